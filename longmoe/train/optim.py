"""The optimizers by parameter path, the learning rate's schedules, gradient clip. The learning rate follows the train state's step."""
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from longmoe.configs import ModelConfig, OptimConfig, TrainConfig
from longmoe.parallel.rules import is_stacked, matrix_axes, path_name, spec_of
from longmoe.shapes import Array, Float, Int

UNDECAYED = r".*(_norm(/scale)?|_residual/(query|scale)|a_log|dt_bias|_conv|embedding)"
"""Parameters that weight decay leaves alone: norms, depth queries, decay gates, convolutions (FLA's flags) and the embedding, whose rows see
a gradient only when their token does."""
FLAT_HEADS = r".*/(kda/(q|k|v)_proj|mla/q_b_proj)/kernel"
"""Projections whose output axis is all heads' channels, head by head."""
KEY_VALUE = r".*/mla/kv_b_proj"
"""MLA's expansion [rank, H, nope + v]: a head's keys, then its values."""

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of Muon's five steps (Jordan et al. 2024). A row a step, since optax scans over rows: one row would be unrolled, and those products
were four in five of all matrix products that XLA had to compile in a train step."""

STACKED = 2**25
"""Entries of alike matrices that are made orthogonal at a time, where single parameters have fewer: hundreds of small products, each by itself, would take
a GPU longer to start than to compute. Large parameters stay alone, for a stack of them is a copy."""


def learning_rate(cfg: TrainConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Linear from 0 over warmup_steps, then by OptimConfig.schedule; float32."""
    optim = cfg.optim
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / max(1, optim.warmup_steps))
    since = lambda start: jnp.clip((step - start) / max(1, cfg.steps - start), 0, 1)
    match optim.schedule:
        case "cosine":
            share = 0.5 * (1 + jnp.cos(jnp.pi * since(optim.warmup_steps)))
        case "wsd":
            share = 1 - since(cfg.steps * (1 - optim.decay_share))
        case "constant":
            share = 1.0
    return warm * (optim.final_learning_rate + (optim.learning_rate - optim.final_learning_rate) * share)


def decayed(params: Any) -> Any:
    """True for each parameter that carries weight decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not re.fullmatch(UNDECAYED, path_name(path)), params)


def optimizer_labels(optim: OptimConfig, params: Any) -> Any:
    """"muon" or "adamw" for each parameter."""
    muon = lambda path: optim.optimizer == "muon" and matrix_axes(path_name(path)) is not None
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if muon(path) else "adamw", params)


def make_optimizer(optim: OptimConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Updates before the learning rate: clip, Muon or Adam in float32, decoupled weight decay. The caller multiplies by -learning_rate."""
    clip = optax.identity() if optim.gradient_clip is None else optax.clip_by_global_norm(optim.gradient_clip)
    adam = optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    by_path = optax.partition({"muon": _muon(optim, model), "adamw": adam}, lambda params: optimizer_labels(optim, params))
    return optax.chain(clip, by_path, optax.add_decayed_weights(optim.weight_decay, mask=decayed))


def _muon(optim: OptimConfig, model: ModelConfig) -> optax.GradientTransformation:
    """optax's Muon on each parameter's matrices, its update scaled to a root mean square of muon_rms.

    The momentum is float32 and kept in the parameter's own shape, and so lies on the mesh like the parameter; matrices are cut out of it for the update only.
    They are made orthogonal in the model's dtype, as Jordan et al. do.
    """
    inner = optax.contrib.scale_by_muon(NEWTON_SCHULZ, beta=optim.muon_momentum, weight_dimension_numbers=_dimension_numbers)
    float_dtype = jnp.promote_types(model.dtype, jnp.float32)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, beta = state.count + 1, optim.muon_momentum
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, count + 1), optax.tree.bias_correction(updates, beta, count)
        momentum = jax.tree.map(lambda mu, gradient: (beta * mu + (1 - beta) * gradient).astype(model.dtype), *ahead)
        parts = jax.tree_util.tree_map_with_path(lambda path, x: _cut(optim, model, path_name(path), x), momentum)
        parts = _orthogonal(parts)
        parts = jax.tree.map(lambda u, axes: u.astype(float_dtype) * (optim.muon_rms * _longer_side(u, axes) ** 0.5), parts, _dimension_numbers(parts))
        return jax.tree.map(_join, updates, parts), state._replace(count=count, mu=mu)

    return optax.GradientTransformation(inner.init, update)


def _orthogonal(parts: Any) -> Any:
    """The orthogonal matrix nearest to each matrix in `parts`, by NEWTON_SCHULZ; those that are alike at the same time."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(parts)
    axes = jax.tree.leaves(_dimension_numbers(parts), is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers))
    alike: dict[Any, list[int]] = {}
    for i, ((path, x), sides) in enumerate(zip(leaves, axes, strict=True)):
        # Equal specs too: matrices on a mesh stay where they are.
        alike.setdefault((x.shape, str(sides), spec_of(path_name(path).rsplit("/", 1)[0])), []).append(i)
    together = lambda members: max(1, STACKED // leaves[members[0]][1].size)
    groups = [members[start:start + together(members)] for members in alike.values() for start in range(0, len(members), together(members))]
    after = lambda side: tuple(axis + 1 for axis in side)
    numbers = [optax.contrib.MuonDimensionNumbers(*map(after, axes[members[0]])) for members in groups]
    # Without momentum of its own: only the orthogonal matrices are wanted of it.
    muon = optax.contrib.scale_by_muon(NEWTON_SCHULZ, beta=0.0, nesterov=False, weight_dimension_numbers=lambda _: numbers)
    stacked = [jnp.stack([leaves[i][1] for i in members]) for members in groups]
    found, _ = muon.update(stacked, muon.init(stacked))
    by_leaf = {i: x for members, xs in zip(groups, found) for i, x in zip(members, xs)}
    return jax.tree_util.tree_unflatten(structure, [by_leaf[i] for i in range(len(leaves))])


def _cut(optim: OptimConfig, model: ModelConfig, name: str, x: Array) -> dict[str, Array]:
    """The parts of a parameter whose matrices are of one size. "whole", or in per-head form: "heads" [.., in, H, out], "keys" and "values" likewise."""
    if optim.muon_per_head and re.fullmatch(FLAT_HEADS, name):
        heads = model.kda.num_heads if "/kda/" in name else model.mla.num_heads
        return {"heads": x.reshape(*x.shape[:-1], heads, -1)}
    if optim.muon_per_head and re.fullmatch(KEY_VALUE, name):
        return {"keys": x[..., :model.mla.nope_dim], "values": x[..., model.mla.nope_dim:]}
    return {"whole": x}


def _join(like: Array, parts: dict[str, Array]) -> Array:
    """The inverse of `_cut`."""
    if "keys" in parts:
        return jnp.concatenate([parts["keys"], parts["values"]], axis=-1)
    (part,) = parts.values()
    return part.reshape(like.shape)


def _dimension_numbers(parts: Any) -> Any:
    """The axes of the matrices in each part that `_cut` made; its other axes count matrices."""
    def axes(path: tuple[Any, ...], _: Array) -> optax.contrib.MuonDimensionNumbers:
        name, part = path_name(path).rsplit("/", 1)
        if part == "whole":
            return optax.contrib.MuonDimensionNumbers(*matrix_axes(name))
        return optax.contrib.MuonDimensionNumbers((0 + is_stacked(name),), (2 + is_stacked(name),))

    return jax.tree_util.tree_map_with_path(axes, parts)


def _longer_side(x: Array, axes: optax.contrib.MuonDimensionNumbers) -> int:
    """An orthogonal matrix of r rows and c columns has root mean square 1 / sqrt(max(r, c))."""
    return max(math.prod(x.shape[axis] for axis in side) for side in axes)
