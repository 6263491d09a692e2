"""The router: full-width sigmoid scores, selection by score plus a non-differentiable bias, combine weights from the bare scores."""
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from longmoe.balancing import auxiliary, balancers, quantile
from longmoe.configs import ModelConfig
from longmoe.model.layers import float_dtype, or_xla, wide_matmul
from longmoe.parallel.experts import over_tokens
from longmoe.shapes import Array, Float, Hidden, Int
from pallas_kernels.dispatch import Implementation


@struct.dataclass
class Routing:
    """Where each token goes."""
    expert_ids: Int[Array, "B T K"]
    """int32; num_experts for padding: no expert."""
    combine_weights: Float[Array, "B T K"]
    """float32; differentiable in the scores."""
    balance_loss: Float[Array, ""] | None
    """Summed over valid tokens, float32, differentiable in the scores; None unless the balancer is auxiliary_loss."""


@functools.cache
def _top_k(implementation: Implementation) -> quantile.TopK:
    """The same object for all layers, so that they are traced once."""
    return functools.partial(pallas_kernels.top_k, implementation=implementation)


class Router(nn.Module):
    """Chooses experts_per_token experts a token and counts what the balancer needs.

    Reads `expert_bias` [E] from the collection router_state under stop_gradient, for selection only; never writes it.
    """
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Hidden, runs: Int[Array, "B T"] | None = None) -> tuple[Routing, balancers.Statistics]:
        config, moe = self.config, self.config.moe
        dtype = float_dtype(config)
        kernel = self.param("kernel", nn.initializers.normal(config.init_std), (x.shape[-1], moe.num_experts), jnp.dtype(config.param_dtype))
        bias = jax.lax.stop_gradient(self.variable("router_state", "expert_bias", jnp.zeros, (moe.num_experts,), jnp.float32).value)
        # A near tie that flips between the forward pass and its recomputation would send a token to another expert: full float32, and the ids are saved.
        if x.dtype == jnp.bfloat16:
            logits = wide_matmul(x, kernel.astype(dtype))
        else:
            logits = jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision=jax.lax.Precision.HIGHEST)
        scores = jax.nn.sigmoid(logits)
        valid = jnp.ones(x.shape[:2], bool) if runs is None else runs > 0
        count = lambda scores, valid, bias: balancers.route(moe, scores, bias, valid, _top_k(or_xla(config)))
        expert_ids, stats = over_tokens(count, jax.lax.stop_gradient(scores), valid, shared=bias)
        expert_ids = checkpoint_name(expert_ids, "router_ids")
        chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if moe.renormalize:
            chosen = chosen / (jnp.sum(chosen, -1, keepdims=True) + 1e-20)
        weights = jnp.where(valid[..., None], chosen * moe.routed_scale, 0)
        loss = auxiliary.balance_loss(scores, expert_ids, valid, moe.balance_loss_over) if moe.balancer == "auxiliary_loss" else None
        return Routing(jnp.where(valid[..., None], expert_ids, moe.num_experts), weights, loss), stats
