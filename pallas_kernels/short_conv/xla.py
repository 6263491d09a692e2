"""The short convolution in plain JAX."""
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(x: Float[Array, "B T C"], taps: Float[Array, "W C"], runs: Int[Array, "B T"] | None, history: Float[Array, "B W-1 C"] | None,
               history_runs: Int[Array, "B W-1"] | None) -> Float[Array, "B T C"]:
    """`api.short_conv`, with derivatives by JAX."""
    width, length = taps.shape[0], x.shape[1]
    padded, padded_runs = with_history(x, width, runs, history, history_runs)
    out = jnp.zeros_like(x)
    for tap in range(width):
        term = padded[:, tap:tap + length] * taps[tap].astype(x.dtype)
        if padded_runs is not None and tap < width - 1:
            term = jnp.where((padded_runs[:, tap:tap + length] == runs)[..., None], term, 0)
        out = out + term
    return jax.nn.silu(out if runs is None else jnp.where((runs > 0)[..., None], out, 0))


def with_history(x: Float[Array, "B T C"], width: int, runs: Int[Array, "B T"] | None, history: Float[Array, "B W-1 C"] | None,
                 history_runs: Int[Array, "B W-1"] | None = None) -> tuple[Float[Array, "B W-1+T C"], Int[Array, "B W-1+T"] | None]:
    """x and runs with the width - 1 inputs before them; history counts as history_runs or else as the first document (run 1), its absence as none (-1)."""
    batch, _, channels = x.shape
    before = jnp.zeros((batch, width - 1, channels), x.dtype) if history is None else history.astype(x.dtype)
    padded = jnp.concatenate([before, x], axis=1)
    if runs is None:
        return padded, None
    if history_runs is None:
        history_runs = jnp.full((batch, width - 1), -1 if history is None else 1, runs.dtype)
    return padded, jnp.concatenate([history_runs, runs], axis=1)
