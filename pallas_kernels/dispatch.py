"""Which implementation of an operator runs: decided from static facts, before anything is traced, and said once in the log.

An operator registers one function per implementation that returns the list of unmet requirements (empty: it can run). `auto` takes the first
implementation that can; a name takes exactly that one or raises `UnsupportedError`; a tuple is tried in order.
"""
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["auto", "mosaic_gpu", "xla", "reference"] | tuple[str, ...]

NAMES = ("mosaic_gpu", "xla", "reference")
"""Every implementation name, in the order in which `auto` tries them."""

logger = logging.getLogger("pallas_kernels")
_override: contextvars.ContextVar[Implementation | None] = contextvars.ContextVar("pallas_kernels_implementation", default=None)
_operators: dict[str, "Operator"] = {}
_announced: set[tuple[str, str, str]] = set()


class UnsupportedError(ValueError):
    """A named implementation cannot take this call. The message lists every unmet requirement and the nearest accepted value."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator's implementations.

    unmet: implementation name -> function of the call's static facts that returns every unmet requirement as a sentence.
    example: the facts of a typical call; `kernel_report` shows what would run for it on this machine.
    """
    name: str
    unmet: Mapping[str, Callable[..., list[str]]]
    example: Mapping[str, Any]


def register(operator: Operator) -> Operator:
    """Makes the operator known to `kernel_report`. Called once, where the operator is defined."""
    _operators[operator.name] = operator
    return operator


class use_implementation:
    """Context manager for debugging: calls with `implementation="auto"` traced inside take `implementation` instead.

    A function that was jitted and traced earlier keeps what it was traced with.

        with use_implementation("reference"):
            o, state = kda(q, k, v, g, beta)
    """

    def __init__(self, implementation: Implementation) -> None:
        candidates(implementation)
        self.implementation = implementation

    def __enter__(self) -> "use_implementation":
        self._token = _override.set(self.implementation)
        return self

    def __exit__(self, *exception: object) -> None:
        _override.reset(self._token)


def candidates(implementation: Implementation) -> tuple[str, ...]:
    """The implementation names that a request allows, in order. ValueError for an unknown name."""
    if implementation == "auto":
        return NAMES
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"implementation: got {implementation!r}, wanted 'auto', one of {list(NAMES)}, or a non-empty tuple of those")
    return names


def choose(operator: Operator, implementation: Implementation, **facts: Any) -> str:
    """Name of the implementation that runs a call with these static facts (shapes, dtypes, keywords).

    Raises UnsupportedError with every unmet requirement of every candidate when none can.
    """
    if implementation == "auto" and (override := _override.get()) is not None:
        implementation = override
    reasons: dict[str, list[str]] = {}
    for name in candidates(implementation):
        unmet = operator.unmet[name](**facts)
        if not unmet:
            _announce(operator.name, name, reasons)
            return name
        reasons[name] = unmet
    lines = [f"  {name}: {reason}" for name, unmet in reasons.items() for reason in unmet]
    lines.append("  'auto' takes the first implementation that can")
    raise UnsupportedError(f"{operator.name}: implementation={implementation!r} cannot take this call:\n" + "\n".join(lines))


def unmet_nothing(**facts: Any) -> list[str]:
    """Of an implementation that takes every valid call, as `xla` and `reference` do."""
    return []


def unmet_on_hopper() -> list[str]:
    """What a Hopper kernel wants of where it runs: the device, and no sharding that XLA would have to undo."""
    unmet = []
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or str(capability) != "9.0":
        found = jax.default_backend() + (f" of compute capability {capability}" if capability else "")
        unmet.append(f"device: got {found}, wanted a Hopper GPU (compute capability 9.0)")
    mesh = jax.sharding.get_abstract_mesh()
    spread = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1]
    if spread:
        unmet.append(f"mesh: got axes {spread} of several devices, over which XLA cannot split a kernel; wanted one device, or the call inside shard_map")
    return unmet


def _announce(operator: str, chosen: str, passed_over: Mapping[str, list[str]]) -> None:
    why = "; ".join(f"not {name}: {', '.join(unmet)}" for name, unmet in passed_over.items())
    if (operator, chosen, why) in _announced:
        return
    _announced.add((operator, chosen, why))
    # On a GPU the portable path costs real speed, so there it is a warning.
    level = logging.WARNING if why and jax.default_backend() == "gpu" else logging.INFO
    logger.log(level, "%s runs as %s%s", operator, chosen, f" ({why})" if why else "")


def available_kernels() -> dict[str, str]:
    """Operator -> the implementation that `auto` takes for a typical call on this machine's default device, or "none"."""
    first = lambda operator: next((name for name in NAMES if not operator.unmet[name](**operator.example)), "none")
    return {operator.name: first(operator) for operator in _operators.values()}


def kernel_report() -> str:
    """A table, operator x implementation: whether a typical call could run on this machine's default device, and if not, why."""
    rows = [("operator", "implementation", "available", "reason")]
    for operator in _operators.values():
        for name in NAMES:
            unmet = operator.unmet[name](**operator.example)
            rows.append((operator.name, name, "no" if unmet else "yes", "; ".join(unmet)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows)
