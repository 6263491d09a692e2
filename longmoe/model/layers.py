"""Small parts shared by the layers: linear maps, RMSNorm, gated activations, the dense feed-forward, the short convolution's history."""
import flax.linen as nn
import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.configs import ModelConfig
from longmoe.shapes import Array, Float, Hidden, Int
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_activation.specs import Gate
from pallas_kernels.short_conv.xla import with_history


def precision(config: ModelConfig) -> jax.lax.Precision:
    """Matmul precision of the model's dtype: float32 means float32, also where a GPU would round to tf32."""
    return jax.lax.Precision.DEFAULT if config.dtype == "bfloat16" else jax.lax.Precision.HIGHEST


def linear(config: ModelConfig, features: int, name: str, start: Array | None = None) -> nn.Dense:
    """A linear layer without bias in the model's dtype; its kernel starts as `start` [in, features] where given, else normal."""
    init = nn.initializers.normal(config.init_std) if start is None else start_from(start)
    return nn.Dense(features, use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, precision=precision(config),
                    kernel_init=init, name=name)


def start_from(value: Array) -> nn.initializers.Initializer:
    """An initializer that gives `value`, whatever the key."""
    return lambda key, shape, dtype=jnp.float32: jnp.broadcast_to(value, shape).astype(dtype)


def or_xla(config: ModelConfig) -> Implementation:
    """The config's implementation for operators that take a token at a time and odd sizes too: there it is xla, whatever else was asked for."""
    return ("mosaic_gpu", "xla") if config.implementation == "mosaic_gpu" else config.implementation


def float_dtype(config: ModelConfig) -> jnp.dtype:
    """Dtype of gates, statistics, softmaxes and routing: float32, or float64 where the model runs in float64."""
    return jnp.promote_types(config.dtype, jnp.float32)


def rms_normalize(x: Array, scale: Array, eps: float) -> Array:
    """x / rms(x) over the last axis with float32 statistics, rounded to x's dtype before the scale (as the released models do)."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale.astype(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a learned scale."""
    config: ModelConfig
    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.config.param_dtype))
        return rms_normalize(x, scale, self.eps)


def gated_activation(config: ModelConfig, gate: Array, linear: Array) -> Array:
    """The model's gated activation of two branches of one shape. Its backward pass keeps the branches alone."""
    return pallas_kernels.gated_activation(gate, linear, gate=_gate(config), implementation=or_xla(config))


def gated_halves(config: ModelConfig, both: Float[Array, "... 2F"]) -> Float[Array, "... F"]:
    """`gated_activation` of the two halves of the last axis: the gate, then the linear branch."""
    return pallas_kernels.gated_activation(both, gate=_gate(config), implementation=or_xla(config))


def _gate(config: ModelConfig) -> Gate:
    return Gate(config.activation, config.situ_beta, config.situ_linear_beta)


class FeedForward(nn.Module):
    """Gated feed-forward: down_proj(activation(gate_proj x, up_proj x))."""
    config: ModelConfig
    hidden_dim: int

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        gate = linear(self.config, self.hidden_dim, "gate_proj")(x)
        up = linear(self.config, self.hidden_dim, "up_proj")(x)
        return linear(self.config, x.shape[-1], "down_proj")(gated_activation(self.config, gate, up))


@jax.custom_vjp
def wide_matmul(x: Float[Array, "... D"], kernel: Float[Array, "D E"]) -> Float[Array, "... E"]:
    """x [bfloat16] times kernel [float32] as exact as a float32 product, in bfloat16 products of a split kernel: tensor cores instead of float32 arithmetic.

    Its gradient of the kernel is as exact; that of x, which is rounded to bfloat16, is to 16 bits.
    """
    return _sum_of_parts(jnp.matmul(x, _split(kernel, 3), preferred_element_type=jnp.float32), 3)


def _split(x: Array, count: int) -> Array:
    """float32 [.., E] -> bfloat16 [.., count E], whose parts add up to x to 8 bits each."""
    parts = []
    for _ in range(count):
        # A conversion to bfloat16 and back is one that XLA may leave out.
        parts.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return jnp.concatenate(parts, axis=-1).astype(jnp.bfloat16)


def _sum_of_parts(x: Array, count: int) -> Array:
    """The smallest first."""
    return sum(reversed(jnp.split(x, count, axis=-1)))


def _wide_matmul_bwd(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    high, low = jnp.split(_split(gradient, 2), 2, axis=-1)
    kernel_high, kernel_low = jnp.split(_split(kernel, 2), 2, axis=-1)
    dx = jnp.matmul(jnp.concatenate([high, low, high], -1), jnp.concatenate([kernel_high, kernel_high, kernel_low], -1).T)
    rows = x.reshape(-1, x.shape[-1])
    dkernel = jnp.matmul(rows.T, _split(gradient, 3).reshape(rows.shape[0], -1), preferred_element_type=jnp.float32)
    return dx, _sum_of_parts(dkernel, 3)


wide_matmul.defvjp(lambda x, kernel: (wide_matmul(x, kernel), (x, kernel)), _wide_matmul_bwd)


def conv_history(x: Float[Array, "B T C"], width: int, runs: Int[Array, "B T"] | None = None,
                 history: Float[Array, "B W-1 C"] | None = None) -> Float[Array, "B W-1 C"]:
    """The history that continues the document of each row's last non-padding token after x."""
    padded, padded_runs = with_history(x, width, runs, history)
    if runs is None:
        return padded[:, padded.shape[1] - (width - 1):]
    positions = jnp.arange(1, x.shape[1] + 1)
    last = jnp.max(jnp.where(runs > 0, positions, 0), axis=1)          # tokens up to and with the last valid one
    index = last[:, None] + jnp.arange(width - 1)
    run_at_end = jnp.take_along_axis(padded_runs, last[:, None] + width - 2, axis=1) if width > 1 else padded_runs[:, :0]
    kept = jnp.take_along_axis(padded, index[..., None], axis=1)
    return jnp.where((jnp.take_along_axis(padded_runs, index, axis=1) == run_at_end)[..., None], kept, 0)
