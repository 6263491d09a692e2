"""Gated activations in plain JAX."""
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.gated_activation.specs import Gate

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
    if gate.dtype in (jnp.bfloat16, jnp.float16):
        return _situ_one_division(beta, linear_beta, a, b).astype(gate.dtype)
    bounded = b if linear_beta is None else linear_beta * tanh(b / linear_beta)
    return (beta * tanh(a / beta) * jax.nn.sigmoid(a) * bounded).astype(gate.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _situ_one_division(beta: float, linear_beta: float | None, a: Array, b: Array) -> Array:
    """SiTU-GLU good to 6e-8 beside its branches' sizes, which is plenty for 16 bits: this layer's time is arithmetic, most of it in divisions."""
    return with_slopes(Gate("situ", beta, linear_beta), a, b)[0]


@_situ_one_division.defjvp
def _situ_jvp(beta: float, linear_beta: float | None, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    y, by_gate, by_linear = with_slopes(Gate("situ", beta, linear_beta), *primals)
    return y, by_gate * tangents[0] + by_linear * tangents[1]


def with_slopes(gate: Gate, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """The activation of two float32 branches, and its derivatives by each."""
    if gate.kind == "swiglu":
        s = 1.0 / (1.0 + _bounded_exp(-a, 80.0))
        return a * s * b, b * s * (1.0 + a * (1.0 - s)), a * s
    bend, share, bounded, slope = _situ_parts(gate.beta, gate.linear_beta, a, b)
    by_gate = share * bounded * (1.0 - bend * bend + gate.beta * bend * (1.0 - share))
    return gate.beta * bend * share * bounded, by_gate, gate.beta * bend * share * slope


def _situ_parts(beta: float, linear_beta: float | None, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """tanh(a / beta), sigmoid(a), the bounded linear branch and its slope: fractions of exponentials with one common denominator.

    Exponents end where the functions are constant in float32, so that the denominators' product stays in range.
    """
    u, w = _bounded_exp(2 / beta * a, 20.0), _bounded_exp(-a, 40.0)
    if linear_beta is None:
        share = 1 / ((u + 1) * (1 + w))
        return (u - 1) * (1 + w) * share, (u + 1) * share, b, 1.0
    z = _bounded_exp(2 / linear_beta * b, 20.0)
    share = 1 / ((u + 1) * (1 + w) * (z + 1))
    bounded = (z - 1) * ((u + 1) * (1 + w)) * share
    return (u - 1) * ((1 + w) * (z + 1)) * share, (u + 1) * (z + 1) * share, linear_beta * bounded, 1 - bounded * bounded


def _bounded_exp(x: Array, bound: float) -> Array:
    return jnp.exp(jnp.minimum(jnp.maximum(x, -bound), bound))


def swiglu(gate: Array, linear: Array) -> Array:
    """silu(gate) * linear, inside in float32."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * linear.astype(wide)).astype(gate.dtype)


def activate(gate: Gate, branches: tuple[Array, ...]) -> Array:
    """Of two branches, or of the halves of one array's last axis."""
    a, b = jnp.split(branches[0], 2, axis=-1) if len(branches) == 1 else branches
    return situ_glu(a, b, gate.beta, gate.linear_beta) if gate.kind == "situ" else swiglu(a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_activation(gate: Gate, branches: tuple[Array, ...]) -> Array:
    """`activate`, whose backward pass keeps the branches alone."""
    return activate(gate, branches)


def _backward(gate: Gate, branches: tuple[Array, ...], gradient: Array) -> tuple[tuple[Array, ...]]:
    # Behind the barrier XLA computes the float32 insides again where it would otherwise write them out in the forward pass.
    branches, gradient = jax.lax.optimization_barrier((branches, gradient))
    return jax.vjp(functools.partial(activate, gate), branches)[1](gradient)


gated_activation.defvjp(lambda gate, branches: (activate(gate, branches), branches), _backward)
