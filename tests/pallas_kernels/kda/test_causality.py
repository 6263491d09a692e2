"""Causal to the bit: what stands at or after token P changes no bit of an output before P, nor of a gradient before P of a loss on those outputs."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import specs

TOKENS = 130
NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("dtype, promise", [
    (jnp.float32, -5.0), (jnp.bfloat16, -5.0), pytest.param(jnp.float32, None, marks=pytest.mark.slow),
    pytest.param(jnp.bfloat16, None, marks=pytest.mark.slow)])
def test_prefix_is_untouched(dtype, promise):
    cast = {n: dtype if n in ("q", "k", "v") else jnp.float32 for n in NAMES}
    first, second = ({n: jnp.asarray(specs.inputs(specs.Shape(1, TOKENS, 2, 16, 24), gate, seed)[n], cast[n]) for n in NAMES}
                     for gate, seed in (("random", 0), ("strong_first", 1)))
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(1, TOKENS, 2, 24)), dtype)

    @jax.jit
    def run(x, prefix):
        mask = lambda a: (jnp.arange(TOKENS) < prefix).reshape(TOKENS, *(1,) * (a.ndim - 2))
        o, pull = jax.vjp(lambda x: kda(**x, lower_bound=promise, implementation="xla")[0], x)
        return o, pull(jnp.where(mask(o), cotangent, 0))[0]

    for prefix in specs.PREFIXES:
        mixed = {n: jnp.concatenate([first[n][:, :prefix], second[n][:, prefix:]], axis=1) for n in NAMES}
        (o, gradients), (other_o, other_gradients) = run(first, prefix), run(mixed, prefix)
        bits = lambda x, prefix=prefix: np.asarray(x[:, :prefix]).tobytes()
        assert bits(o) == bits(other_o), prefix
        assert not [n for n in NAMES if bits(gradients[n]) != bits(other_gradients[n])], prefix
        assert not np.array_equal(o[:, prefix:], other_o[:, prefix:])
