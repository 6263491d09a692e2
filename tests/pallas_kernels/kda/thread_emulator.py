"""Runs code that KDA's kernels write for the threads of a warpgroup on a CPU: 128 threads in numpy, shared memory as bytes, a few PTX instructions.

`patched(monkeypatch, *modules)` puts it in Mosaic's place; functions of those modules then take and give numpy arrays, and `Shared` for references. What it
checks besides the values: instructions of whole warps are reached by whole warps, barriers by all threads, and between two barriers no warp reads
or overwrites what another wrote, or overwrites what another read.
"""
import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

THREADS, WARPS, LANES = 128, 4, 32
LANE, WARP = np.arange(THREADS) % LANES, np.arange(THREADS) // LANES
DTYPES = {"f32": np.float32, "i32": np.int32, "i1": np.bool_}


class Value:
    """One register of every thread: [128], or [128, 2] for a pair."""

    def __init__(self, array, kind):
        self.array, self.type = np.asarray(array, DTYPES[kind]), kind

    def unsigned(self):
        return self.array.view(np.uint32)


class Shared:
    """An array in shared memory: float32 as it lies, bfloat16 [64, 64] in the tensor cores' swizzle."""

    def __init__(self, machine, array, swizzled=False):
        self.machine, self.shape, self.swizzled = machine, np.shape(array), swizzled
        data = np.asarray(array, np.float32) if not swizzled else np.asarray(jnp.asarray(array, jnp.bfloat16)).view(np.uint16)
        self.base = machine.allocate(data.nbytes)
        if swizzled:
            row, column = np.indices(self.shape)
            at = row * 128 + (((column // 8) ^ (row % 8)) * 16) + column % 8 * 2
            machine.memory[self.base + at] = data & 0xFF
            machine.memory[self.base + at + 1] = data >> 8
        else:
            machine.memory[self.base:self.base + data.nbytes] = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)

    def array(self):
        size = int(np.prod(self.shape)) * 4
        return self.machine.memory[self.base:self.base + size].copy().view(np.float32).reshape(self.shape)


class Machine:
    def __init__(self):
        self.memory, self.used = np.zeros(1 << 18, np.uint8), 0
        self.active = [np.ones(THREADS, bool)]
        self.barrier()

    def allocate(self, size):
        base, self.used = self.used, -(-(self.used + size) // 1024) * 1024
        return base

    def barrier(self):
        assert self.active[-1].all(), "a barrier that not all threads reach"
        self.writer, self.readers = np.full(len(self.memory), -1), np.zeros((len(self.memory), WARPS), bool)

    def whole_warps(self):
        mask = self.active[-1].reshape(WARPS, LANES)
        assert (mask.all(1) | ~mask.any(1)).all(), "an instruction of whole warps that only some threads of one reach"
        return mask.any(1)

    @contextlib.contextmanager
    def only(self, condition):
        self.active.append(self.active[-1] & condition)
        yield
        self.active.pop()

    def read(self, addresses, size, threads):
        """Bytes [threads, size] at addresses [threads]."""
        at = addresses[:, None] + np.arange(size)
        writer, warp = self.writer[at], WARP[threads][:, None]
        assert ((writer < 0) | (writer == warp)).all(), "read of what another warp wrote, without a barrier between"
        self.readers[at, warp] = True
        return self.memory[at]

    def write(self, addresses, data, threads):
        at, warp = addresses[:, None] + np.arange(data.shape[1]), WARP[threads][:, None]
        writer, others = self.writer[at], self.readers[at].copy()
        others[np.arange(len(threads))[:, None], np.arange(data.shape[1]), warp] = False
        assert ((writer < 0) | (writer == warp)).all() and not others.any(), "write over what another warp wrote or read, without a barrier between"
        self.writer[at] = warp
        self.memory[at] = data


def _bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round_bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16)).view(np.uint16).astype(np.uint32)


def _matrix(packed):
    """Registers [32] of a warp -> 8 x 8 bfloat16 bits."""
    halves = np.stack([packed & 0xFFFF, packed >> 16], axis=-1)
    return halves.reshape(8, 8)


def _registers(matrix):
    halves = matrix.reshape(32, 2).astype(np.uint32)
    return halves[:, 0] | (halves[:, 1] << 16)


class Ptx:
    """inline_ptx: the instructions that the kernels use."""

    def __init__(self, machine):
        self.machine = machine

    def __call__(self, ptx, *arguments, result_types=None, **_):
        name = ptx.split()[0]
        found = getattr(self, name.replace(".", "_").replace("::", "_"))(*arguments)
        results = [Value(x.view(DTYPES[kind]) if x.dtype.itemsize == 4 else x, kind) for x, kind in
                   zip(found if isinstance(found, tuple) else (found,), (result_types,) if isinstance(result_types, str) else result_types)]
        return results[0] if isinstance(result_types, str) else tuple(results)

    def per_warp(self, count, function):
        """function(slice of a warp's threads) -> `count` uint32 or float32 [32] each; warps that do not take part get zeros."""
        results, there = None, self.machine.whole_warps()
        for warp in range(WARPS):
            threads = slice(warp * LANES, (warp + 1) * LANES)
            if there[warp]:
                found = function(threads)
                results = results or [np.zeros(THREADS, x.dtype) for x in found]
                for result, part in zip(results, found):
                    result[threads] = part
        return tuple(results or [np.zeros(THREADS, np.uint32)] * count)

    def cvt_rn_bf16x2_f32(self, high, low):
        return (_round_bfloat16(high.array) << 16) | _round_bfloat16(low.array)

    def prmt_b32(self, first, second):
        return (first.unsigned() >> 16) | (second.unsigned() & np.uint32(0xFFFF0000))

    def ex2_approx_ftz_f32(self, x):
        return np.exp2(x.array)

    def rcp_approx_ftz_f32(self, x):
        return np.float32(1) / x.array

    def mov_b32(self, x):
        return x.array

    def mov_u32(self):
        return LANE.astype(np.int32)

    def movmatrix_sync_aligned_m8n8_trans_b16(self, x):
        return self.per_warp(1, lambda threads: (_registers(_matrix(x.unsigned()[threads]).T),))

    def ldmatrix(self, address, turned):
        def load(threads):
            index = np.arange(THREADS)[threads]
            data = self.machine.read(address.array[threads], 16, index).copy().view(np.uint16).reshape(4, 8, 8)
            return tuple(_registers(m.T if turned else m) for m in data)
        return self.per_warp(4, load)

    def ldmatrix_sync_aligned_m8n8_x4_shared_b16(self, address):
        return self.ldmatrix(address, False)

    def ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(self, address):
        return self.ldmatrix(address, True)

    def mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(self, *registers):
        left, right, sums = registers[:4], registers[4:6], registers[6:]

        def multiply(threads):
            block = lambda x: _bfloat16(_matrix(x.unsigned()[threads]))
            a = np.block([[block(left[0]), block(left[2])], [block(left[1]), block(left[3])]])
            b = np.concatenate([block(x).T for x in right])
            c = np.concatenate([np.stack([sums[2 * half + one].array[threads] for one in range(2)], -1).reshape(8, 8) for half in range(2)])
            result = (a.astype(np.float64) @ b + c).astype(np.float32)
            return tuple(result[8 * half:8 * half + 8].reshape(32, 2)[:, one].copy() for half in range(2) for one in range(2))
        return self.per_warp(4, multiply)


class Array:
    """FragmentedArray in the layout of the tensor cores' results, or a scalar."""

    def __init__(self, *, _registers, _layout=None, _is_signed=None):
        self.registers, self.layout = _registers, _layout

    @classmethod
    def of(cls, x):
        registers = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        flat = registers.reshape(8, 2)
        for eight in range(8):
            for half in range(2):
                row, column = 16 * WARP + LANE // 4 + 8 * half, 8 * eight + 2 * (LANE % 4)
                flat[eight, half] = Value(np.stack([x[row, column], x[row, column + 1]], -1), "f32")
        return cls(_registers=registers)

    def values(self):
        x, flat = np.zeros((64, 64), np.float32), self.registers.reshape(8, 2)
        for eight in range(8):
            for half in range(2):
                row, column = 16 * WARP + LANE // 4 + 8 * half, 8 * eight + 2 * (LANE % 4)
                x[row, column], x[row, column + 1] = flat[eight, half].array.T
        return x


def patched(monkeypatch, *modules):
    """The machine that the modules' functions run on from now on."""
    machine = Machine()
    integers = lambda f: lambda a, b: Value(f(a.array, b.array), "i32")
    floats = lambda f: lambda a, b: Value(f(a.array, b.array), "f32")
    compare = dict(eq=np.equal, uge=np.greater_equal, ugt=np.greater, ule=np.less_equal, ult=np.less)
    everyone = lambda value, kind: Value(np.full(THREADS, value), kind)

    def store(value, address):
        active = np.flatnonzero(machine.active[-1])
        data = np.ascontiguousarray(value.array.reshape(THREADS, -1)[active]).view(np.uint8).reshape(len(active), -1)
        machine.write(address.array[active], data, active)

    def load(kind, address):
        count = 2 if kind == "pair" else 1
        active = np.flatnonzero(machine.active[-1])
        data = np.zeros((THREADS, count), np.float32)
        data[active] = machine.read(address.array[active], 4 * count, active).copy().view(np.float32)
        return Value(data if count == 2 else data[:, 0], "f32")

    def insert(pair, value, position):
        both = pair.array.copy()
        both[:, position.array[0]] = value.array
        return Value(both, "f32")

    class If:
        def __init__(self, condition, types, has_else):
            self.then_block, self.else_block = (self, condition.array), (self, ~condition.array)
            self.given, self.condition = [], condition

        @property
        def results(self):
            return [select(self.condition, *pair) for pair in zip(*self.given)]

    current = []

    @contextlib.contextmanager
    def insertion(block):
        current.append(block[0])
        with machine.only(block[1]):
            yield
        current.pop()

    def butterfly(x, distance):
        machine.whole_warps()
        return Value(x.array[np.arange(THREADS) ^ distance], x.type)

    def warp_idx(sync):
        assert machine.active[-1].all(), "the warp's index is a shuffle: all threads must reach it"
        return Value(WARP, "i32")

    def inline(*, arg_types=(), return_type=None):
        def decorate(f):
            def call(*arguments):
                machine.barrier()
                turn = lambda x: tuple(map(turn, x)) if isinstance(x, tuple) else x if isinstance(x, Shared) else Array.of(np.asarray(x, np.float32))
                found = f(None, *map(turn, arguments))
                return tuple(x.values() for x in found) if isinstance(found, tuple) else None if found is None else found.values()
            return call
        return decorate

    select = lambda condition, a, b: Value(np.where(condition.array, a.array, b.array), a.type)
    arith = SimpleNamespace(
        addi=integers(np.add), subi=integers(np.subtract), muli=integers(np.multiply), ori=integers(np.bitwise_or),
        shrui=integers(np.right_shift), andi=lambda a, b: Value(a.array & b.array, a.type), xori=lambda a, b: Value(a.array ^ b.array, a.type),
        negf=lambda a: Value(-a.array, "f32"), select=select,
        cmpi=lambda how, a, b: Value(compare[how](a.unsigned(), b.unsigned()), "i1"), bitcast=lambda kind, x: Value(x.array.view(DTYPES[kind]), kind),
        index_cast=lambda kind, x: Value(x.array, kind), CmpIPredicate=SimpleNamespace(**{name: name for name in compare}))
    utils = SimpleNamespace(
        c=everyone, inline_ptx=Ptx(machine), when=lambda condition: machine.only(condition.array), warpgroup_barrier=machine.barrier, warp_idx=warp_idx,
        shfl_bfly=butterfly, memref_ptr=lambda ref: everyone(ref.base, "i32"),
        getelementptr=lambda pointer, offsets, kind: Value(pointer.array + 4 * offsets[0].array, "i32"))
    names = dict(
        arith=arith, utils=utils, FragmentedArray=Array, addf=floats(np.add), subf=floats(np.subtract), mulf=floats(np.multiply),
        plgpu=SimpleNamespace(inline_mgpu=inline, RefType=lambda *_: None, Layout=SimpleNamespace(WG_SPLAT=lambda *_: None)),
        llvm=SimpleNamespace(mlir_undef=lambda _: Value(np.zeros((THREADS, 2)), "f32"), insertelement=insert, store=store, load=load,
                             ptrtoint=lambda kind, pointer: pointer),
        vector=SimpleNamespace(extract=lambda pair, dynamic_position, static_position: Value(pair.array[:, static_position[0]].copy(), pair.type)),
        scf=SimpleNamespace(IfOp=If, yield_=lambda values: current[-1].given.append(list(values))),
        ir=SimpleNamespace(IntegerType=SimpleNamespace(get_signless=lambda bits: f"i{bits}"), F32Type=SimpleNamespace(get=lambda: "f32"),
                           VectorType=SimpleNamespace(get=lambda shape, kind: "pair"), DenseI64ArrayAttr=SimpleNamespace(get=list),
                           InsertionPoint=insertion, Value=Value))
    for module in modules:
        for name, stand_in in names.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    return machine
