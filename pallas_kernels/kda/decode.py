"""`kda_step`: one token, for decoding."""
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.kda import gates, mosaic_gpu_decode, reference, specs
from pallas_kernels.kda.mosaic_gpu_decode import Call

OPERATOR = register(Operator(name="kda_step", unmet=specs.STEP_UNMET, example=specs.STEP_EXAMPLE))


def kda_step(q: Float[Array, "B H Dk"], k: Float[Array, "B H Dk"], v: Float[Array, "B H Dv"], g: Float[Array, "B H Dk"],
             beta: Float[Array, "B H"], state: Float[Array, "B H Dk Dv"], *, gate: Literal["log_decay", "bounded", "softplus"] = "log_decay",
             a_log: Float[Array, "H"] | None = None, dt_bias: Float[Array, "H Dk"] | None = None, lower_bound: float | None = None,
             beta_logits: bool = False, qk_l2norm: bool = False, scale: float | None = None,
             implementation: Implementation = "auto") -> tuple[Float[Array, "B H Dv"], Float[Array, "B H Dk Dv"]]:
    """One token of `kda`, same keywords and meanings: -> o [B, H, Dv] in v's dtype, the next state in the state's dtype (float32, or float64).

    All arithmetic is in the state's precision, beta and the decay included: an error there would stay in the state. The kernel on Hopper writes
    the next state over the old one where the caller donates it. Both `xla` and `reference` are the plain recurrence. Raises as `kda` does.
    """
    channels = ("B", "H", "Dk")
    sizes = specs.check_arrays(dict(q=(q, channels), k=(k, channels), v=(v, ("B", "H", "Dv")), g=(g, channels), beta=(beta, ("B", "H")),
                                    state=(state, ("B", "H", "Dk", "Dv")), a_log=(a_log, ("H",)), dt_bias=(dt_bias, ("H", "Dk"))))
    specs.check_gate(gate, a_log, dt_bias, lower_bound)
    chosen = choose(OPERATOR, implementation, dtypes=tuple(jnp.result_type(x) for x in (q, k, v, g, beta)), state_dtype=jnp.result_type(state),
                    key=sizes["Dk"], value=sizes["Dv"])
    call = Call(gate, gates.bound_of(gate, lower_bound), beta_logits, qk_l2norm, sizes["Dk"] ** -0.5 if scale is None else float(scale))
    run = _kernel if chosen == "mosaic_gpu" and 0 not in (sizes["B"], sizes["H"]) else _recurrence
    return run(call, q, k, v, g, beta, state, a_log, dt_bias)


def _recurrence(call: Call, q, k, v, g, beta, state, a_log, dt_bias):
    dtype = jnp.promote_types(jnp.result_type(q, k, v, g, beta, state), jnp.float32)
    o_dtype = v.dtype
    q, k, v, g, beta, state = (x.astype(dtype) for x in (q, k, v, g, beta, state))
    g = gates.log_decay(g, call.gate, a_log, dt_bias, call.bound)
    if call.beta_logits:
        beta = jax.nn.sigmoid(beta)
    if call.normalize:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    o, state = reference.token(q, k, v, g, beta, state, call.scale)
    return o.astype(o_dtype), state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(call: Call, *arrays: Any):
    return mosaic_gpu_decode.step(call, *arrays)


def _kernel_forward(call, *arrays):
    return mosaic_gpu_decode.step(call, *arrays), arrays


def _kernel_backward(call, arrays, cotangents):
    # One token's gradient is nobody's hot path: the plain recurrence gives it.
    return jax.vjp(partial(_recurrence, call), *arrays)[1](cotangents)


_kernel.defvjp(_kernel_forward, _kernel_backward)
