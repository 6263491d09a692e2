"""The optimizers by parameter path, warm-up and cosine, gradient clip. The learning rate follows the train state's step."""
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from longmoe.configs import OptimConfig, TrainConfig
from longmoe.parallel.rules import matrix_axes, path_name
from longmoe.shapes import Array, Float, Int

UNDECAYED = r".*(_norm(/scale)?|_residual/(query|scale)|a_log|dt_bias|_conv|embedding)"
"""Parameters that weight decay leaves alone: norms, depth queries, decay gates, convolutions (FLA's flags) and the embedding, whose rows see
a gradient only when their token does."""

def learning_rate(cfg: TrainConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Linear from 0 over warmup_steps, then a cosine to final_learning_rate at the last step; float32."""
    optim = cfg.optim
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / max(1, optim.warmup_steps))
    progress = jnp.clip((step - optim.warmup_steps) / max(1, cfg.steps - optim.warmup_steps), 0, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return warm * (optim.final_learning_rate + (optim.learning_rate - optim.final_learning_rate) * cosine)


def decayed(params: Any) -> Any:
    """True for each parameter that carries weight decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not re.fullmatch(UNDECAYED, path_name(path)), params)


def optimizer_labels(optim: OptimConfig, params: Any) -> Any:
    """"muon" or "adamw" for each parameter."""
    muon = lambda path: optim.optimizer == "muon" and matrix_axes(path_name(path)) is not None
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if muon(path) else "adamw", params)


def _to_rms(name: str, update: Array, rms: float) -> float:
    """An orthogonal matrix of r rows and c columns has root mean square 1 / sqrt(max(r, c)); the factor that makes it `rms`."""
    return rms * max(update.shape[axis] for axis in matrix_axes(name)) ** 0.5


def _dimension_numbers(name: str) -> optax.contrib.MuonDimensionNumbers | None:
    axes = matrix_axes(name)
    return None if axes is None else optax.contrib.MuonDimensionNumbers(*axes)


def make_optimizer(optim: OptimConfig) -> optax.GradientTransformation:
    """Updates before the learning rate: clip, Muon or Adam in float32, decoupled weight decay. The caller multiplies by -learning_rate."""
    clip = optax.identity() if optim.gradient_clip is None else optax.clip_by_global_norm(optim.gradient_clip)
    adam = optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    axes = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: _dimension_numbers(path_name(path)), params)
    even = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(lambda path, u: u * _to_rms(path_name(path), u, optim.muon_rms), updates))
    muon = optax.chain(optax.contrib.scale_by_muon(beta=optim.muon_momentum, weight_dimension_numbers=axes), even)
    by_path = optax.partition({"muon": muon, "adamw": adam}, lambda params: optimizer_labels(optim, params))
    return optax.chain(clip, by_path, optax.add_decayed_weights(optim.weight_decay, mask=decayed))
