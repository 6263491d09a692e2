"""Tables by parameter path: how each parameter lies on the mesh, exactly one rule a parameter, and which of its axes are those of a matrix."""
import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longmoe.parallel.experts import DOWN, GATE_UP

SHARDED = ("fsdp", "expert")
"""Axes that split a parameter outside the routed experts: the expert axis holds copies of it otherwise."""
IN = PartitionSpec(SHARDED, "tensor")
OUT = PartitionSpec("tensor", SHARDED)
WHOLE = PartitionSpec()

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embedding", OUT),
    (r"lm_head", IN),
    (r".*/experts_gate_up", GATE_UP),
    (r".*/experts_down", DOWN),
    (r".*/router/kernel", PartitionSpec(SHARDED, None)),
    (r".*/latent_(down|up)/kernel", PartitionSpec(SHARDED, None)),
    (r".*/(mlp|shared)/(gate|up)_proj/kernel", IN),
    (r".*/(mlp|shared)/down_proj/kernel", OUT),
    (r".*/kda/(q|k|v|g|b)_proj/kernel", IN),
    (r".*/kda/(f|g)_a_proj/kernel", PartitionSpec(SHARDED, None)),
    (r".*/kda/(f|g)_b_proj/kernel", PartitionSpec(None, "tensor")),
    (r".*/kda/(q|k|v)_conv", PartitionSpec(None, "tensor")),
    (r".*/kda/(a_log|dt_bias)", PartitionSpec("tensor")),
    (r".*/kda/o_norm", WHOLE),
    (r".*/mla/(q_a|kv_a)_proj/kernel", PartitionSpec(SHARDED, None)),
    (r".*/mla/(q_b|g)_proj/kernel", IN),
    (r".*/mla/kv_b_proj", PartitionSpec(SHARDED, "tensor", None)),
    (r".*/(kda|mla)/o_proj/kernel", OUT),
    (r"(.*/)?\w+_norm/scale", WHOLE),
    (r"(.*/)?(attn|ffn|output)_residual/(query|scale)", WHOLE),
)

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]
MATRICES: tuple[tuple[str, MatrixAxes], ...] = (
    (r".*/experts_gate_up", ((1,), (3,))),
    (r".*/experts_down", ((1,), (2,))),
    (r".*/mla/kv_b_proj", ((0,), (1, 2))),
    (r".*/(kda/(q|k|v|g|f_a|f_b|g_a|g_b|o)_proj|mla/(q_a|q_b|kv_a|g|o)_proj)/kernel", ((0,), (1,))),
    (r".*/((mlp|shared)/(gate|up|down)_proj|latent_(down|up))/kernel", ((0,), (1,))),
)
"""Parameters that Muon takes, with the input and the output axes of a matrix: their other axes (experts, the gate and up halves) count matrices.
The router and beta's projection, whose rows are choices and scalars of heads, stay with AdamW."""


def path_name(path: tuple[Any, ...]) -> str:
    """`layer_00/kda/q_proj/kernel` from a key path of jax.tree_util."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def is_stacked(name: str) -> bool:
    """Whether a parameter holds one slice for each repeat of a scanned super-block, on its first axis."""
    return name.startswith("layers_")


def spec_of(name: str) -> PartitionSpec:
    """The spec of the parameter at this path. ValueError unless exactly one rule matches."""
    specs = [spec for pattern, spec in RULES if re.fullmatch(pattern, name)]
    if len(specs) != 1:
        raise ValueError(f"parameter {name!r}: {len(specs)} sharding rules match, wanted exactly 1")
    return PartitionSpec(None, *specs[0]) if is_stacked(name) else specs[0]


def matrix_axes(name: str) -> MatrixAxes | None:
    """Input and output axes of the matrices in the parameter at this path; None for one that is no matrix to an optimizer."""
    for pattern, axes in MATRICES:
        if re.fullmatch(pattern, name):
            # Scanned layers are one more axis, in front.
            rows, columns = (tuple(axis + is_stacked(name) for axis in side) for side in axes)
            return rows, columns
    return None


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """A NamedSharding for each parameter (arrays or shapes). ValueError names a parameter whose dimension does not divide."""
    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        spec = spec_of(name)
        for axis, (dim, axes) in enumerate(zip(leaf.shape, spec)):
            devices = math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
            if dim % devices:
                raise ValueError(f"parameter {name!r}: dimension {axis} is {dim}, wanted a multiple of {devices}, the devices along mesh axes {axes}; "
                                 "change the mesh or that size")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)
