"""The Kimi Delta Attention layer: projections, short convolutions, decay gate, the operator, gated norm (Kimi K3 report eq. 1-6)."""
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import pallas_kernels
from longmoe.configs import ModelConfig
from longmoe.model.cache import KDACache, KDACarry
from longmoe.model.layers import conv_history, float_dtype, linear, or_xla, rms_normalize
from longmoe.parallel.context import Convolution, sharded_convolutions, sharded_kda
from longmoe.shapes import Array, Hidden, Int
from pallas_kernels.dispatch import Implementation


def init_dt_bias(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32, dt_min: float = 0.001, dt_max: float = 0.1) -> Array:
    """Mamba-2's rule: the inverse softplus of a step drawn log-uniformly from [dt_min, dt_max]."""
    low, high = jnp.log(dt_min), jnp.log(dt_max)
    step = jnp.exp(jax.random.uniform(key, shape) * (high - low) + low)
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def init_a_log_softplus(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """log U(1, 16), as the released softplus-gated model; the bounded gate starts from zero."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)).astype(dtype)


def init_conv(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """Uniform in +-1/sqrt(taps)."""
    return jax.random.uniform(key, shape, dtype, -shape[0] ** -0.5, shape[0] ** -0.5)


@functools.cache
def _convolution(implementation: Implementation) -> Convolution:
    """The same object for all layers, so that they are traced once."""
    return functools.partial(pallas_kernels.short_conv, implementation=implementation)


MIMETIC_TAPS = {"q": -1, "k": -2, "v": -1}
"""Tap that each mimetic convolution passes on: the key of a token is the query of the token before it, so a query finds what followed it last time."""
MIMETIC_NOISE = 0.3


def init_mimetic_conv(name: str) -> nn.initializers.Initializer:
    """`init_conv` scaled by MIMETIC_NOISE, plus one at the tap of MIMETIC_TAPS that exists."""
    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        tap = max(MIMETIC_TAPS[name], -shape[0])
        return (MIMETIC_NOISE * init_conv(key, shape, dtype)).at[tap].add(1)
    return init


class KDA(nn.Module):
    """Token mixer with a recurrent state of fixed size.

    config.init "mimetic": keys start with the queries' projection and taps one token later, and the output projection as the transpose of the values'.
    """
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Hidden, runs: Int[Array, "B T"] | None = None,
                 cache: KDACache | KDACarry | None = None) -> tuple[Hidden, KDACache | KDACarry | None]:
        """runs: document of each token, 0 = padding. Returns the output and, where one was given, the cache or the carry after x.

        With a cache every row is one document; with a carry x is the next piece of packed rows, whose documents runs numbers throughout.
        """
        config, kda = self.config, self.config.kda
        batch, tokens, width = x.shape
        heads = (batch, tokens, kda.num_heads, kda.head_dim)
        q, k, v, conv = self._convolved(x, runs, cache)
        g = linear(config, kda.num_heads * kda.head_dim, "f_b_proj")(linear(config, kda.head_dim, "f_a_proj")(x))
        a_log = self.param("a_log", nn.initializers.zeros if kda.gate == "bounded" else init_a_log_softplus,
                           (kda.num_heads,), jnp.float32)
        dt_bias = self.param("dt_bias", init_dt_bias, (kda.num_heads, kda.head_dim), jnp.float32, kda.dt_min, kda.dt_max)
        beta = linear(config, kda.num_heads, "b_proj")(x).astype(float_dtype(config))
        keywords = dict(gate=kda.gate, a_log=a_log, dt_bias=dt_bias, lower_bound=kda.lower_bound if kda.gate == "bounded" else None,
                        beta_logits=True, qk_l2norm=True, implementation=config.implementation)
        # What a layer that is recomputed keeps lives no longer than its own backward pass.
        residuals = "recompute" if config.remat == "none" else "save"
        q, k, v, g = (y.reshape(heads) for y in (q, k, v, g))
        if cache is None:
            o = sharded_kda(q, k, v, g, beta, runs=runs, residuals=residuals, **keywords)
        elif isinstance(cache, KDACarry):
            goes_on = jnp.bool_(True) if runs is None else ((runs[:, 0] == cache.runs[:, -1]) & (runs[:, 0] > 0))[:, None, None, None]
            o, state = sharded_kda(q, k, v, g, beta, runs=runs, initial_state=jnp.where(goes_on, cache.state, 0), residuals=residuals, **keywords)
        elif tokens == 1 and runs is None:
            o, state = pallas_kernels.kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state, **keywords)
            o = o[:, None]
        else:
            o, state = pallas_kernels.kda(q, k, v, g, beta, initial_state=cache.state, segment_ids=runs, **keywords)
        y = self._gated_norm(o, x).reshape(batch, tokens, -1)
        y = linear(config, width, "o_proj", self._mimetic("v_proj", transpose=True))(y)
        if isinstance(cache, KDACarry):
            seen = cache.runs if runs is None else jnp.concatenate([cache.runs, runs], axis=1)[:, -kda.conv_width:]
            return y, KDACarry(conv=conv, state=state, runs=seen)
        return y, None if cache is None else KDACache(conv=conv, state=state.astype(cache.state.dtype))

    def _convolved(self, x: Hidden, runs: Array | None, cache: KDACache | KDACarry | None) -> tuple[Array, Array, Array, Array | None]:
        """q, k, v after convolution and SiLU, and the convolutions' history after x."""
        config, kda = self.config, self.config.kda
        features = kda.num_heads * kda.head_dim
        inputs, taps = [], []
        for name in "qkv":
            inputs.append(linear(config, features, f"{name}_proj", self._mimetic("q_proj") if name == "k" else None)(x))
            init = init_mimetic_conv(name) if config.init == "mimetic" else init_conv
            taps.append(self.param(f"{name}_conv", init, (kda.conv_width, features), jnp.dtype(config.param_dtype)))
        convolve = _convolution(or_xla(config))
        if cache is None:
            return *sharded_convolutions(convolve, inputs, taps, runs), None
        histories = jnp.split(cache.conv, 3, axis=-1)
        carried = isinstance(cache, KDACarry)
        before = cache.runs[:, 1:] if carried and runs is not None else None
        outputs = [convolve(y, weights, runs, history, before) for y, weights, history in zip(inputs, taps, histories)]
        # A carry keeps the last tokens whatever they are, for it knows their documents; a cache those of its one document.
        after = [conv_history(y, kda.conv_width, None if carried else runs, history) for y, history in zip(inputs, histories)]
        return *outputs, jnp.concatenate(after, axis=-1)

    def _mimetic(self, name: str, transpose: bool = False) -> Array | None:
        """While mimetic parameters are made, the kernel of an earlier linear layer to start from; otherwise None."""
        if self.config.init != "mimetic" or not self.is_initializing():
            return None
        kernel = self.variables["params"][name]["kernel"]
        return kernel.T if transpose else kernel

    def _gated_norm(self, o: Array, x: Hidden) -> Array:
        """RMSNorm over a head's channels, then the sigmoid gate from the layer's input."""
        config, kda = self.config, self.config.kda
        features = kda.num_heads * kda.head_dim
        if kda.output_gate == "full_rank":
            gate = linear(config, features, "g_proj")(x)
        else:
            gate = linear(config, features, "g_b_proj")(linear(config, kda.head_dim, "g_a_proj")(x))
        scale = self.param("o_norm", nn.initializers.ones, (kda.head_dim,), jnp.dtype(config.param_dtype))
        gate = jax.nn.sigmoid(gate.astype(float_dtype(config))).reshape(o.shape)
        return (rms_normalize(o, scale, config.norm_eps) * gate).astype(o.dtype)
