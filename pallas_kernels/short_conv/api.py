"""`short_conv`: the causal depthwise convolution over a few tokens, with SiLU, that comes before linear attention."""
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operator, choose, register
from pallas_kernels.short_conv import specs, xla

OPERATOR = register(Operator(name="short_conv", unmet=specs.UNMET, example=specs.EXAMPLE))


def short_conv(x: Float[Array, "B T C"], taps: Float[Array, "W C"], runs: Int[Array, "B T"] | None = None, history: Float[Array, "B W-1 C"] | None = None,
               history_runs: Int[Array, "B W-1"] | None = None, *, implementation: Implementation = "auto") -> Float[Array, "B T C"]:
    """silu(sum over taps of tap * the input that many tokens back), channel by channel; the last tap meets the current token.

    Args:
      x: any float dtype; the result has it. "mosaic_gpu" works in float32 inside, "xla" in x's dtype.
      taps: W a channel, in any float dtype.
      runs: document of each token (`document_runs`), 0 = padding; a token sees its own document only, and padding gives 0. None: one document a row.
      history: the inputs before x; None = zeros.
      history_runs: their documents in the numbering of runs; None = the first one of each row.
      implementation: "auto", a name, or a tuple tried in order.

    Differentiable in x, taps and history. Raises ValueError for arguments that do not fit, UnsupportedError (a ValueError) when a named implementation cannot
    take the call.
    """
    x, taps = jnp.asarray(x), jnp.asarray(taps)
    specs.check_arguments(x, taps, runs, history, history_runs)
    chosen = choose(OPERATOR, implementation, tokens=x.shape[1], channels=x.shape[2], width=taps.shape[0], dtype=x.dtype)
    if chosen != "mosaic_gpu":
        return xla.short_conv(x, taps, runs, history, history_runs)
    # Pallas is a heavy import, and of no use where the kernels cannot run.
    from pallas_kernels.short_conv import vjp
    out = vjp.short_conv(x, taps, runs)
    if history is None:
        return out
    # A history reaches the first tokens alone.
    reach = taps.shape[0] - 1
    first = xla.short_conv(x[:, :reach], taps, None if runs is None else runs[:, :reach], history, history_runs)
    return out.at[:, :reach].set(first)
