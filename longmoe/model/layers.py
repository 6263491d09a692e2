"""Small parts shared by the layers: linear maps, RMSNorm, gated activations, the dense feed-forward, the short convolution's history."""
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from longmoe.configs import ModelConfig
from longmoe.shapes import Array, Float, Hidden, Int
from pallas_kernels.dispatch import Implementation
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


# Odd minimax polynomial of tanh below 0.625, highest power first (Cephes, tanhf).
TANH_SMALL = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


@jax.custom_jvp
def tanh(x: Array) -> Array:
    """tanh; in float32 within 1.3 units in the last place, 0.3 root mean square. XLA's own errs by up to 4.6 and 1.05, which a deep model's gradients show."""
    if x.dtype != jnp.float32:
        return jnp.tanh(x)
    size, square = jnp.abs(x), x * x
    small = x + x * (square * jnp.polyval(jnp.asarray(TANH_SMALL, jnp.float32), square))
    return jnp.where(size < 0.625, small, jnp.sign(x) * (1 - 2 / (jnp.exp(2 * size) + 1)))


@tanh.defjvp
def _tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = tanh(primals[0])
    return y, tangents[0] * ((1 - y) * (1 + y))


def situ_glu(gate: Array, linear: Array, beta: float, linear_beta: float | None) -> Array:
    """SiTU-GLU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(linear / linear_beta), inside in float32.

    linear_beta None leaves the linear branch as it is. Same shape and dtype as `gate`. (Kimi K3 report, Stable LatentMoE.)
    """
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    a, b = gate.astype(wide), linear.astype(wide)
    if gate.dtype == jnp.bfloat16:
        return _situ_one_division(beta, linear_beta, a, b).astype(gate.dtype)
    bounded = b if linear_beta is None else linear_beta * tanh(b / linear_beta)
    return (beta * tanh(a / beta) * jax.nn.sigmoid(a) * bounded).astype(gate.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _situ_one_division(beta: float, linear_beta: float | None, a: Array, b: Array) -> Array:
    """SiTU-GLU good to 6e-8 beside its branches' sizes, which is plenty for bfloat16: this layer's time is arithmetic, most of it in divisions."""
    bend, gate, bounded, _ = _situ_parts(beta, linear_beta, a, b)
    return beta * bend * gate * bounded


@_situ_one_division.defjvp
def _situ_jvp(beta: float, linear_beta: float | None, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    bend, gate, bounded, slope = _situ_parts(beta, linear_beta, *primals)
    by_gate = gate * bounded * (1 - bend * bend + beta * bend * (1 - gate))
    return beta * bend * gate * bounded, by_gate * tangents[0] + beta * bend * gate * slope * tangents[1]


def _situ_parts(beta: float, linear_beta: float | None, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """tanh(a / beta), sigmoid(a), the bounded linear branch and its slope: fractions of exponentials with one common denominator.

    Exponents end where the functions are constant in float32, so that the denominators' product stays in range.
    """
    u, w = jnp.exp(jnp.clip(2 / beta * a, -20, 20)), jnp.exp(jnp.clip(-a, -40, 40))
    if linear_beta is None:
        share = 1 / ((u + 1) * (1 + w))
        return (u - 1) * (1 + w) * share, (u + 1) * share, b, jnp.ones_like(b)
    z = jnp.exp(jnp.clip(2 / linear_beta * b, -20, 20))
    share = 1 / ((u + 1) * (1 + w) * (z + 1))
    bounded = (z - 1) * ((u + 1) * (1 + w)) * share
    return (u - 1) * ((1 + w) * (z + 1)) * share, (u + 1) * (z + 1) * share, linear_beta * bounded, 1 - bounded * bounded


def swiglu(gate: Array, linear: Array) -> Array:
    """silu(gate) * linear, inside in float32."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * linear.astype(wide)).astype(gate.dtype)


def gated_activation(config: ModelConfig, gate: Array, linear: Array) -> Array:
    """The model's gated activation of two branches of one shape. Its backward pass keeps the branches alone."""
    return _gated(_Activation.of(config), (gate, linear))


def gated_halves(config: ModelConfig, both: Float[Array, "... 2F"]) -> Float[Array, "... F"]:
    """`gated_activation` of the two halves of the last axis: the gate, then the linear branch."""
    return _gated(_Activation.of(config), (both,))


class _Activation(NamedTuple):
    """Which gated activation: static facts."""
    kind: str
    beta: float
    linear_beta: float | None

    @classmethod
    def of(cls, config: ModelConfig) -> "_Activation":
        return cls(config.activation, config.situ_beta, config.situ_linear_beta)

    def __call__(self, branches: tuple[Array, ...]) -> Array:
        gate, linear = jnp.split(branches[0], 2, axis=-1) if len(branches) == 1 else branches
        return situ_glu(gate, linear, self.beta, self.linear_beta) if self.kind == "situ" else swiglu(gate, linear)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: _Activation, branches: tuple[Array, ...]) -> Array:
    return activation(branches)


def _gated_bwd(activation: _Activation, branches: tuple[Array, ...], gradient: Array) -> tuple[tuple[Array, ...]]:
    # Behind the barrier XLA computes the float32 insides again where it would otherwise write them out in the forward pass.
    branches, gradient = jax.lax.optimization_barrier((branches, gradient))
    return jax.vjp(activation, branches)[1](gradient)


_gated.defvjp(lambda activation, branches: (activation(branches), branches), _gated_bwd)


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
