"""The one place that makes a mesh, and the activation constraints that the model asks for."""
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from longmoe.configs import MeshConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the rows of a batch. Experts' axis is one of them: devices that share out experts also share out tokens."""
TOKEN_AXES = (*BATCH_AXES, "context")
"""Mesh axes that split tokens: statistics are summed over these."""
HIDDEN = PartitionSpec(BATCH_AXES, "context", None)
"""Activations [B, T, D]."""


def make_mesh(mesh_config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """A mesh with axes data, fsdp, expert, tensor, context over `devices` (default: all).

    Raises ValueError when the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dataclasses.asdict(mesh_config)
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {name: len(devices) // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"mesh_config: got axes {sizes} whose product is {math.prod(sizes.values())}, wanted {len(devices)}, "
                         "the number of devices; change an axis or set one to -1")
    # AxisType is named because its default differs between JAX releases.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def axis_size(name: str) -> int:
    """Devices along axis `name` of the mesh in use; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def is_distributed() -> bool:
    """Whether a mesh of several devices is in use."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def constrain(x: jax.Array, spec: PartitionSpec = HIDDEN) -> jax.Array:
    """`x` laid out as `spec` says on the mesh in use; `x` itself without a mesh, or where a dimension does not divide."""
    if not is_distributed() or any(dim % _devices(axes) for dim, axes in zip(x.shape, spec)):
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def check_divides(name: str, size: int, axes: str | tuple[str, ...]) -> None:
    """ValueError unless the devices along `axes` of the mesh in use can share out `size` evenly; `name` says what it is the size of."""
    if size % (devices := _devices(axes)):
        where = f"axis {axes!r}" if isinstance(axes, str) else f"axes {', '.join(axes)}"
        raise ValueError(f"{name}: got {size}, wanted a multiple of {devices}, the devices along mesh {where}")


def check_tokens(x: jax.Array) -> None:
    """ValueError unless the mesh in use shares out the rows and tokens of `x` [B, T, ...] evenly."""
    check_divides("rows of a batch", x.shape[0], BATCH_AXES)
    check_divides("tokens of a row", x.shape[1], "context")


def _devices(axes: str | tuple[str, ...] | None) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(axis_size(name) for name in names)
