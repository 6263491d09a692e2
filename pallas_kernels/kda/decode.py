"""`kda_step`: one token, for decoding."""
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.kda import gates, reference, specs

OPERATOR = register(Operator(name="kda_step", unmet=specs.STEP_UNMET, example=specs.EXAMPLE))


def kda_step(q: Float[Array, "B H Dk"], k: Float[Array, "B H Dk"], v: Float[Array, "B H Dv"], g: Float[Array, "B H Dk"],
             beta: Float[Array, "B H"], state: Float[Array, "B H Dk Dv"], *, gate: Literal["log_decay", "bounded", "softplus"] = "log_decay",
             a_log: Float[Array, "H"] | None = None, dt_bias: Float[Array, "H Dk"] | None = None, lower_bound: float | None = None,
             beta_logits: bool = False, qk_l2norm: bool = False, scale: float | None = None,
             implementation: Implementation = "auto") -> tuple[Float[Array, "B H Dv"], Float[Array, "B H Dk Dv"]]:
    """One token of `kda`, same keywords and meanings: -> o [B, H, Dv] in v's dtype, the next state in the state's dtype (float32, or float64).

    All arithmetic is in the state's precision, beta and the decay included: an error there would stay in the state.
    Both `xla` and `reference` are the plain recurrence. Raises as `kda` does.
    """
    channels = ("B", "H", "Dk")
    sizes = specs.check_arrays(dict(q=(q, channels), k=(k, channels), v=(v, ("B", "H", "Dv")), g=(g, channels), beta=(beta, ("B", "H")),
                                    state=(state, ("B", "H", "Dk", "Dv")), a_log=(a_log, ("H",)), dt_bias=(dt_bias, ("H", "Dk"))))
    specs.check_gate(gate, a_log, dt_bias, lower_bound)
    choose(OPERATOR, implementation, gate=gate, lower_bound=lower_bound, dtype=jnp.result_type(q, k, v), g_dtype=g.dtype,
           key=sizes["Dk"], value=sizes["Dv"])
    dtype = jnp.promote_types(jnp.result_type(q, k, v, g, beta, state), jnp.float32)
    o_dtype = v.dtype
    q, k, v, g, beta, state = (x.astype(dtype) for x in (q, k, v, g, beta, state))
    g = gates.log_decay(g, gate, a_log, dt_bias, lower_bound)
    if beta_logits:
        beta = jax.nn.sigmoid(beta)
    if qk_l2norm:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    o, state = reference.token(q, k, v, g, beta, state, sizes["Dk"] ** -0.5 if scale is None else scale)
    return o.astype(o_dtype), state
