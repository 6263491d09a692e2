"""The public operators `kda` and `kda_segment`: checks, the choice of implementation, and everything that happens before the recurrence."""
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.kda import gates, reference, specs, vjp, xla
from pallas_kernels.kda.decode import kda_step
from pallas_kernels.kda.documents import document_runs, state_owner

__all__ = ["kda", "kda_segment", "kda_step"]

Gate = Literal["log_decay", "bounded", "softplus"]
OPERATOR = register(Operator(name="kda", unmet=specs.UNMET, example=specs.EXAMPLE))


def kda(q: Float[Array, "B T H Dk"], k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H Dk"],
        beta: Float[Array, "B T H"], *, gate: Gate = "log_decay", a_log: Float[Array, "H"] | None = None,
        dt_bias: Float[Array, "H Dk"] | None = None, lower_bound: float | None = None, beta_logits: bool = False, qk_l2norm: bool = False,
        scale: float | None = None, initial_state: Float[Array, "B H Dk Dv"] | None = None, segment_ids: Int[Array, "B T"] | None = None,
        residuals: Literal["recompute", "save"] = "recompute",
        implementation: Implementation = "auto") -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H Dk Dv"]]:
    """Kimi Delta Attention: a delta-rule recurrence with a decay per channel (Kimi Linear, arXiv 2510.26692). Per head, with S [Dk, Dv]:

        S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale * S^T q_t

    q, k, v: any floating dtype. bfloat16 gives bfloat16 products with float32 sums; float32 gives float32 throughout; float64 likewise. Gates,
      beta, running decays and the state are float32 in every case but float64.
    g: what it holds depends on `gate`. "log_decay": the log decay, at most 0. "bounded": raw, the log decay is
      lower_bound * sigmoid(exp(a_log) * (g + dt_bias)). "softplus": raw, -exp(a_log) * softplus(g + dt_bias).
    beta: write strength in [0, 1]; with beta_logits its logit.
    a_log, dt_bias: parameters of the last two gates; None = 0.
    lower_bound: with "bounded" the bound itself, None = -5. With "log_decay" a promise that g >= lower_bound, never checked and never a clamp:
      it lets the 16-token diagonal tiles be dense products (down to -5.45; a lower promise takes the exact tiles, like no promise).
    qk_l2norm: normalises q and k per head, x * rsqrt(sum x^2 + 1e-6).
    scale: None = Dk ** -0.5.
    initial_state: state before the first token, of the document of the first token that is not padding; None = 0.
    segment_ids: 0 = padding: o is 0 there, the state passes unchanged, and the gradient is exactly 0 whatever the inputs hold, NaN included.
      A new document (see `document_runs`) starts from a zero state.
    residuals: what the backward pass keeps besides its inputs. "recompute": the state before every 64-token chunk. "save": also the chunk's
      inverse and written values: less work, more memory, the same numbers up to rounding. The kernels on Hopper always keep states and values.
    implementation: "auto", a name, or a tuple tried in order.

    Returns o [B, T, H, Dv] in v's dtype and the state after the last token that is not padding, [B, H, Dk, Dv] float32 (float64 with float64
    inputs). Differentiable in every floating array. Causal to the bit: no value at a token changes an earlier output, or the gradient of a loss
    on earlier outputs at an earlier token.

    Raises ValueError for arguments that do not fit, UnsupportedError (a ValueError) when a named implementation cannot take the call.
    """
    rows, channels = ("B", "T", "H"), ("B", "T", "H", "Dk")
    sizes = specs.check_arrays(dict(q=(q, channels), k=(k, channels), v=(v, (*rows, "Dv")), g=(g, channels), beta=(beta, rows),
                                    a_log=(a_log, ("H",)), dt_bias=(dt_bias, ("H", "Dk")), initial_state=(initial_state, ("B", "H", "Dk", "Dv")),
                                    segment_ids=(segment_ids, ("B", "T"))))
    chosen = _choose(sizes, implementation, q, k, v, g, gate=gate, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound, residuals=residuals)
    if initial_state is None:
        initial_state = jnp.zeros([sizes[n] for n in ("B", "H", "Dk", "Dv")])
    return _run(chosen, q, k, v, g, beta, initial_state, segment_ids, residuals, scale=sizes["Dk"] ** -0.5 if scale is None else float(scale), gate=gate,
                a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_logits=beta_logits, qk_l2norm=qk_l2norm)


def kda_segment(k: Float[Array, "B T H Dk"], v: Float[Array, "B T H Dv"], g: Float[Array, "B T H Dk"], beta: Float[Array, "B T H"], *,
                gate: Gate = "log_decay", a_log: Float[Array, "H"] | None = None, dt_bias: Float[Array, "H Dk"] | None = None,
                lower_bound: float | None = None, beta_logits: bool = False, qk_l2norm: bool = False,
                segment_ids: Int[Array, "B T"] | None = None, residuals: Literal["recompute", "save"] = "recompute",
                implementation: Implementation = "auto") -> tuple[Float[Array, "B H Dk Dk"], Float[Array, "B H Dk Dv"]]:
    """What a stretch of tokens does to the state: final_state(S0) = transition @ S0 + state, for the same keywords as `kda`.

    Returns transition [B, H, Dk, Dk] and state [B, H, Dk, Dv], float32 (float64 with float64 inputs). Two stretches compose to
    (M2 @ M1, M2 @ b1 + b2), in any grouping, which is what context parallelism sends between devices: its size does not depend on T.

    The state is linear in its start and each column of it evolves alone, so one call on v = [v, 0] from the state [0, identity] gives both.
    """
    rows, channels = ("B", "T", "H"), ("B", "T", "H", "Dk")
    sizes = specs.check_arrays(dict(k=(k, channels), v=(v, (*rows, "Dv")), g=(g, channels), beta=(beta, rows), a_log=(a_log, ("H",)),
                                    dt_bias=(dt_bias, ("H", "Dk")), segment_ids=(segment_ids, ("B", "T"))))
    chosen = _choose(sizes, implementation, k, k, v, g, gate=gate, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound, residuals=residuals)
    start = jnp.concatenate([jnp.zeros((sizes["Dk"], sizes["Dv"])), jnp.eye(sizes["Dk"])], axis=1)
    start = jnp.broadcast_to(start, (sizes["B"], sizes["H"], *start.shape))
    both = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, sizes["Dk"])))
    _, state = _run(chosen, jnp.zeros_like(k), k, both, g, beta, start, segment_ids, residuals, scale=1.0, gate=gate, a_log=a_log, dt_bias=dt_bias,
                    lower_bound=lower_bound, beta_logits=beta_logits, qk_l2norm=qk_l2norm)
    return state[..., sizes["Dv"]:], state[..., :sizes["Dv"]]


def _choose(sizes: dict[str, int], implementation: Implementation, q: Array, k: Array, v: Array, g: Array, *, gate: Gate, a_log: Array | None,
            dt_bias: Array | None, lower_bound: float | None, residuals: str) -> str:
    """Checks keywords -> name of the implementation that runs the call."""
    specs.check_gate(gate, a_log, dt_bias, lower_bound)
    if residuals not in specs.RESIDUALS:
        raise ValueError(f"residuals: got {residuals!r}, wanted one of {list(specs.RESIDUALS)}")
    return choose(OPERATOR, implementation, gate=gate, lower_bound=lower_bound, dtype=jnp.result_type(q, k, v), g_dtype=g.dtype,
                  key=sizes["Dk"], value=sizes["Dv"])


def _run(chosen: str, q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array, segment_ids: Array | None, residuals: str, *,
         scale: float, **inside: Any) -> tuple[Array, Array]:
    """The chosen implementation on checked arguments. inside: the keywords for what happens before the recurrence."""
    state_dtype, o_dtype = jnp.promote_types(jnp.result_type(q, k, v, g, beta), jnp.float32), v.dtype
    initial_state = initial_state.astype(state_dtype)
    if chosen == "mosaic_gpu" and 0 not in k.shape[:3]:
        return vjp.kda(q, k, v, g, beta, initial_state, segment_ids, scale=scale, save=residuals == "save", **inside)
    operand = operand_dtype(q, k, v) if state_dtype == jnp.float32 else state_dtype
    q, k, v, g, beta, initial_state, owner, valid = _prepare(q, k, v, g, beta, initial_state, segment_ids, operand, **inside)
    if 0 in k.shape[:3]:
        o, state = jnp.zeros_like(v), initial_state
    elif chosen == "reference":
        o, state = reference.forward(q, k, v, g, beta, initial_state, owner, scale=scale)
    else:
        factored = specs.factored(inside["gate"], inside["lower_bound"])
        o, state = xla.kda(q, k, v, g, beta, initial_state, owner, scale=scale, factored=factored, save=residuals == "save")
    return _mask(o, valid).astype(o_dtype), state


def operand_dtype(*arrays: Array) -> Any:
    """Dtype of the operands of products: that of q, k and v together. float16 cannot hold the factors' range, so it becomes float32."""
    dtype = jnp.result_type(*arrays)
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _mask(x: Array, valid: Array | None) -> Array:
    return x if valid is None else jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0)


def _prepare(q, k, v, g, beta, initial_state, segment_ids, operand, *, gate, a_log, dt_bias, lower_bound, beta_logits, qk_l2norm):
    """Gates, sigmoid, normalisation, padding: -> arrays for the recurrence, the state's owner, and where tokens are real (None: everywhere).

    Padding is selected out before anything else, since NaN * 0 is NaN, in the gradient too; and again after the gate and the sigmoid,
    which turn 0 into something else.
    """
    dtype = initial_state.dtype
    if segment_ids is None:
        owner = valid = None
    else:
        runs = document_runs(segment_ids)
        owner, valid = state_owner(runs), runs != 0
    q, k, v, g, beta = (_mask(x, valid) for x in (q, k, v, g, beta))
    g = _mask(gates.log_decay(g.astype(dtype), gate, a_log, dt_bias, lower_bound), valid)
    beta = _mask(jax.nn.sigmoid(beta.astype(dtype)) if beta_logits else beta.astype(dtype), valid)
    if qk_l2norm:
        q, k = gates.l2_normalize(q.astype(dtype)), gates.l2_normalize(k.astype(dtype))
    arrays = [q.astype(operand), k.astype(operand), v.astype(operand), g, beta, initial_state, owner]
    return *_vary_together(arrays), valid


def _vary_together(arrays: list[Array | None]) -> list[Array | None]:
    """Inside shard_map, makes all arrays vary over the same mesh axes, as the carry of a scan must. Elsewhere returns them as they are."""
    axes = [_varying_axes(x) for x in arrays]
    union = frozenset().union(*axes)
    return [x if x is None or not union - have else jax.lax.pcast(x, tuple(union - have), to="varying") for x, have in zip(arrays, axes)]


def _varying_axes(x: Array | None) -> frozenset:
    if x is None:
        return frozenset()
    kind = jax.typeof(x)
    return getattr(kind, "vma", None) or getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset())
