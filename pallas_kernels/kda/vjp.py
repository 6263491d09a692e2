"""The operator on Hopper: what surrounds the Mosaic GPU kernels, and their gradient.

Per-token scalars (beta, owners of the state) and per-head parameters are brought into the kernels' layout by XLA, with their own gradients by
JAX: together under 1% of the traffic. Everything with Dk or Dv channels goes into the kernels as the caller gave it.
"""
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.kda import gates
from pallas_kernels.kda.chunk import CHUNK
from pallas_kernels.kda.documents import document_runs, state_owner
from pallas_kernels.kda.mosaic_gpu_backward import backward
from pallas_kernels.kda.mosaic_gpu_forward import forward
from pallas_kernels.kda.mosaic_gpu_tiles import Config, Inputs


def kda(q, k, v, g, beta, initial_state, segment_ids, *, scale: float, gate: str, a_log, dt_bias, lower_bound: float | None, beta_logits: bool,
        qk_l2norm: bool, save: bool = False, interpret: Any = None) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H Dk Dv"]]:
    """Arguments as `api.kda` takes them, q, k, v bfloat16, the gates bounded. save: the backward pass does not prepare the chunks again.
    interpret: `plgpu.InterpretGPUParams`, for tests."""
    length = q.shape[1]
    padding = -length % CHUNK
    if padding and segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    g = g if g.dtype == jnp.bfloat16 else g.astype(jnp.float32)
    beta = beta.astype(jnp.float32)
    beta = jax.nn.sigmoid(beta) if beta_logits else beta
    if padding:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        q, k, v, g, beta, segment_ids = (pad(x) for x in (q, k, v, g, beta, segment_ids))
    owner = edges = rate = bias = None
    if segment_ids is not None:
        runs = document_runs(segment_ids)
        owner = state_owner(runs)
        beta = jnp.where((runs != 0)[..., None], beta, -1.0)
        last = owner[:, CHUNK - 1::CHUNK]
        edges = jnp.stack([jnp.pad(last, ((0, 0), (1, 0)), constant_values=1)[:, :-1], last], axis=-1)
    if gate == "bounded":
        heads, key = q.shape[2:]
        rate = jnp.ones((heads,)) if a_log is None else jnp.exp(a_log.astype(jnp.float32))
        bias = jnp.zeros((heads, key)) if dt_bias is None else rate[:, None] * dt_bias.astype(jnp.float32)
    bound = gates.bound_of(gate, lower_bound) if gate == "bounded" else None
    config = Config(scale, bound, qk_l2norm, save, interpret)
    x = Inputs(q, k, v, g, jnp.swapaxes(beta, 1, 2), rate, bias, owner, edges)
    o, state = operator(config, x, initial_state.astype(jnp.float32))
    return o[:, :length], state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def operator(config: Config, x: Inputs, initial: Float[Array, "B H K V"]) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    return forward(config, x, initial)[:2]


def _operator_forward(config, x, initial):
    o, final, kept = forward(config, x, initial, save=True)
    return (o, final), (x, kept)


def _operator_backward(config, residuals, cotangents):
    return backward(config, *residuals, *cotangents)


operator.defvjp(_operator_forward, _operator_backward)
