"""What a traced function holds at its fullest, on paper: the liveness of its values under XLA's rules of fusion. Nothing is compiled or allocated.

A value is *stored* or *fused*. Elementwise results, broadcasts, casts and slices are fused into what reads them (and computed again for every reader), unless
a reader needs its operand in memory (a matmul, a sort, a loop) or they are costly and read twice. Operations run in the order in which they were traced.
"""
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat2",
           "custom_vmap_call", "eval_jaxpr"}
REMAT = {"checkpoint", "remat2"}
VIEWS = {"reshape", "squeeze", "expand_dims", "sharding_constraint", "name", "stop_gradient", "copy", "copy_p", "pvary"}
CHEAP = {
    "add", "sub", "mul", "neg", "max", "min", "abs", "sign", "and", "or", "not", "xor", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "square",
    "convert_element_type", "broadcast_in_dim", "transpose", "iota", "slice", "pad", "rev", "is_finite", "clamp", "floor", "ceil", "round", "dynamic_slice",
    "shift_right_logical", "shift_left", "shift_right_arithmetic", "add_any", "integer_pow", "reduce_precision",
    "one_minus_square", "split", "unstack"}
COSTLY = {"div", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt", "pow", "erf", "erf_inv", "sin", "cos", "rem", "cbrt",
          "asinh", "sinh"}
READERS = CHEAP | COSTLY | VIEWS | {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin", "concatenate", "stack"}
"""Operations that take fused operands."""
IN_PLACE = {"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"}
"""Operations that write into their first operand where nothing reads it afterwards."""
LOOPS = {"scan", "while"}
BARRIER = "optimization_barrier"
"""Its operands are in memory, its results are they again, but operations on them are not those on the operands."""


@dataclasses.dataclass
class Op:
    """One operation over numbered values."""
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inner: int = 0
    """Bytes that a loop's body holds beside its operands and results."""
    stacked: tuple[int, ...] = ()
    """Results of a scan that its rounds write one slice each."""


class Program:
    """A flat list of operations with the size of every value."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.size: list[int] = []
        self._seen: dict[Any, tuple[int, ...]] = {}
        self._regions = 0

    def value(self, aval: Any) -> int:
        self.size.append(_bytes(aval))
        return len(self.size) - 1

    def add(self, jaxpr: Jaxpr, inputs: Sequence[int], region: int = 0) -> list[int]:
        """Appends the operations of `jaxpr` on the values `inputs`; returns its results. Equal operations on equal operands of one region happen once."""
        names: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            names[var] = self.value(var.aval)
        read = lambda atom: self.value(jax.core.ShapedArray((), "int32")) if isinstance(atom, Literal) else names[atom]
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            for var, result in zip(eqn.outvars, self._apply(eqn, operands, region), strict=True):
                names[var] = result
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, operands: list[int], region: int) -> Iterable[int]:
        name = eqn.primitive.name
        if name in INLINED:
            body = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in eqn.params)
            if name in REMAT:
                self._regions += 1
                region = self._regions
            return self.add(body.jaxpr if isinstance(body, ClosedJaxpr) else body, operands, region)
        if name in VIEWS:
            return operands[:len(eqn.outvars)]
        key = (name, region, *(str(atom) if isinstance(atom, Literal) else at for atom, at in zip(eqn.invars, operands)), str(eqn.params)) \
            if name in CHEAP | COSTLY | {"dot_general"} else None
        if key is not None and key in self._seen:
            return self._seen[key]
        reads = tuple(at for atom, at in zip(eqn.invars, operands) if not isinstance(atom, Literal))
        writes = tuple(self.value(var.aval) for var in eqn.outvars)
        if name == BARRIER:
            for at in writes:
                self.size[at] = 0
        self.ops.append(Op(name, reads, writes, _inner(eqn), _stacked(eqn, writes)))
        if key is not None:
            self._seen[key] = writes
        return writes


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval.dtype, "itemsize") else 0


def _inner(eqn: Any) -> int:
    """What one round of a loop holds, its operands and results apart."""
    bodies = [x for param in eqn.params.values() for x in (param if isinstance(param, tuple | list) else (param,)) if isinstance(x, ClosedJaxpr | Jaxpr)]
    if not bodies or eqn.primitive.name not in ("scan", "while", "cond"):
        return 0
    return max(own_peak(body.jaxpr if isinstance(body, ClosedJaxpr) else body) for body in bodies)


def filled_buffers(program: Program, start: int) -> int:
    """Bytes that loops and updates in place from operation `start` on write into, and that hold zeros before: accumulators, and stacked results of scans."""
    zeros = {at for op in program.ops for at in op.writes if op.name == "broadcast_in_dim" and not op.reads}
    later = program.ops[start:]
    filled = {at for op in later if op.name in LOOPS or op.name in IN_PLACE for at in op.reads if at in zeros} | {at for op in later for at in op.stacked}
    return sum(program.size[at] for at in filled)


def _stacked(eqn: Any, writes: Sequence[int]) -> tuple[int, ...]:
    """The results of a scan that have one axis more than what a round of it gives."""
    if eqn.primitive.name != "scan":
        return ()
    return tuple(at for at, var, slice_ in zip(writes, eqn.outvars, eqn.params["jaxpr"].out_avals, strict=True) if var.aval.ndim == slice_.ndim + 1)


def own_peak(jaxpr: Jaxpr) -> int:
    """Most bytes that a function holds beside its arguments."""
    program = Program()
    inputs = [program.value(var.aval) for var in jaxpr.invars]
    outputs = program.add(jaxpr, inputs)
    return max(live(program, inputs, outputs), default=0)


def stored(program: Program, outputs: Iterable[int]) -> set[int]:
    """Values that exist in memory; the others are fused into their readers."""
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for at in set(op.reads):
            readers.setdefault(at, []).append(op)
    kept, needed = set(), set(outputs)
    for op in reversed(program.ops):
        for at in op.writes if op.name != BARRIER else ():
            reading = readers.get(at, [])
            fusible = op.name in CHEAP | COSTLY and (len(reading) <= 1 or not op.reads)
            if at in needed or not fusible or any(reader.name not in READERS for reader in reading):
                kept.add(at)
    return kept


def last_reads(program: Program, kept: set[int], outputs: Iterable[int]) -> dict[int, int]:
    """Position of the last operation that needs each value: through fused readers, of those that read them."""
    end = dict.fromkeys(outputs, len(program.ops))
    for position in range(len(program.ops) - 1, -1, -1):
        op = program.ops[position]
        fused = not any(at in kept for at in op.writes)
        until = max((end.get(at, position) for at in op.writes), default=position) if fused else position
        for at in op.reads:
            end[at] = max(end.get(at, -1), until)
    return end


def live(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Stored bytes beside `inputs` while each operation runs."""
    kept = stored(program, outputs)
    end = last_reads(program, kept, outputs)
    held, now, result = set(inputs), 0, []
    dying: dict[int, list[int]] = {}
    for at in kept:
        dying.setdefault(end.get(at, -1), []).append(at)
    for position, op in enumerate(program.ops):
        new = [at for at in op.writes if at in kept and at not in held]
        ending = [at for at in dying.get(position, []) if at not in op.writes and at not in inputs]
        added, freed = sum(program.size[at] for at in new), sum(program.size[at] for at in ending)
        # A loop's results, an update and an elementwise result may take the place of an operand that nothing reads afterwards.
        reused = min(added, freed) if op.name in READERS or op.name in IN_PLACE or op.inner else 0
        result.append(now + added - reused + op.inner)
        now += added - freed - sum(program.size[at] for at in new if end.get(at, -1) < position)
    return result
