"""Each arm against its recurrence one token at a time, in float32; what folds members into heads; the KDA arm against the library's layer."""
from functools import partial

import jax
import jax.numpy as jnp
import mixers
import numpy as np
import pytest

from longmoe.configs import KDAConfig, ModelConfig
from longmoe.model.kda import KDA
from pallas_kernels.testing import rms_ratio

SIZE = mixers.ModelSize(vocab_size=32, width=24, num_heads=2, head_dim=16, dtype="float32")


def inputs(arm, batch=2, tokens=150, heads=2, key=16, value=24, seed=0):
    draw = np.random.default_rng(seed)
    channels = (key,) if arm == "kda" else ()
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    return dict(q=normal(batch, tokens, heads, key), k=normal(batch, tokens, heads, key), v=normal(batch, tokens, heads, value),
                g=normal(batch, tokens, heads, *channels) - 4, beta=normal(batch, tokens, heads), a_log=normal(heads),
                dt_bias=normal(heads, *channels))


def segments(tokens):
    """A row of one document; a row of padding, documents that start inside chunks and on their edges, padding between and at the end."""
    second = np.repeat([0, 1, 2, 0, 3, 4, 0], [3, 30, 31, 5, 59, 12, 10])
    return jnp.asarray(np.stack([np.ones(tokens, int), second[:tokens]]), jnp.int32)


def recurrence(arm, q, k, v, g, beta, *, a_log, dt_bias, segment_ids):
    """A token at a time; the decay is written out here, and the state of a new document is 0."""
    g, dt_bias = (g, dt_bias) if arm == "kda" else (g[..., None], dt_bias[:, None])
    decay = jnp.exp(-5 * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * (g + dt_bias)))
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
    q, k, beta = unit(q) * q.shape[-1]**-0.5, unit(k), 1 / (1 + jnp.exp(-beta))

    def token(carry, x):
        (state, last), (q, k, v, decay, beta, here) = carry, x
        fresh, real = ((here != last) & (here != 0))[:, None, None, None], (here != 0)[:, None, None, None]
        moved = decay[..., None] * jnp.where(fresh, 0, state)
        stored = 0 if arm == "no_delta_rule" else jnp.einsum("bhk,bhkv->bhv", k, moved)
        moved = moved + k[..., None] * (beta[..., None] * (v - stored))[..., None, :]
        state, last = jnp.where(real, moved, state), jnp.where(here != 0, here, last)
        return (state, last), jnp.where(real[..., 0], jnp.einsum("bhk,bhkv->bhv", q, moved), 0)

    start = jnp.zeros((*k.shape[:1], *k.shape[2:], v.shape[-1])), jnp.zeros_like(segment_ids[:, 0])
    _, o = jax.lax.scan(token, start, [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, v, decay, beta, segment_ids)])
    return jnp.moveaxis(o, 0, 1)


@pytest.mark.parametrize("arm", mixers.ARMS)
def test_outputs_and_gradients_are_the_recurrences(arm):
    x, ids = inputs(arm), segments(150)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 150, 2, 24)), jnp.float32)

    def run(function):
        total = lambda x: (jnp.sum(weights * (o := function(**x, segment_ids=ids))), o)
        (_, o), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
        return dict(o=o, **gradients)

    got, want = run(partial(mixers.mix, arm)), run(partial(recurrence, arm))
    assert not np.asarray(got["o"])[1][np.asarray(ids)[1] == 0].any()
    wrong = {name: ratio for name in want if not (ratio := rms_ratio(got[name], want[name])) < 1e-4}
    assert not wrong


def test_the_arms_are_three_functions():
    outputs = []
    for arm in mixers.ARMS:
        x = inputs("scalar_decay")
        if arm == "kda":                                                 # its channels differ, which is all that sets it apart from one decay a head
            spread = jnp.linspace(-2, 2, 16)
            x |= dict(g=x["g"][..., None] + spread, dt_bias=jnp.broadcast_to(x["dt_bias"][:, None], (2, 16)))
        outputs.append(jax.jit(partial(mixers.mix, arm))(**x, segment_ids=segments(150)))
    assert all(rms_ratio(a, b) > 0.03 for i, a in enumerate(outputs) for b in outputs[:i])


def test_linear_attention_has_no_infinities_at_strong_decay():
    """64 tokens at -5 add up to -320, whose inverse is no float32."""
    q, k, v = (jnp.ones((1, 130, 1, 4)) for _ in range(3))
    g, beta, ids = jnp.full((1, 130, 1), -5.0), jnp.ones((1, 130, 1)), jnp.ones((1, 130), jnp.int32)
    value, gradient = jax.jit(jax.value_and_grad(lambda g: jnp.sum(mixers.linear_attention(q, k, v, g, beta, ids))))(g)
    assert np.isfinite(value) and np.isfinite(np.asarray(gradient)).all() and np.abs(np.asarray(gradient)).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["kda", "no_delta_rule"])
def test_members_do_not_see_each_other(arm):
    params = mixers.stack([mixers.init_params(seed, SIZE, arm) for seed in range(3)])
    draw = np.random.default_rng(0)
    tokens, places = draw.integers(32, size=(3, 2, 40)), draw.integers(40, size=(3, 2, 5))
    ids = jnp.asarray(np.repeat([[1, 2], [1, 0]], [25, 15], axis=1), jnp.int32)
    apply = jax.jit(partial(mixers.apply, size=SIZE, arm=arm))
    together = apply(params, tokens, ids, places)
    one = jax.tree.map(lambda x: x[1:2], params)
    np.testing.assert_allclose(apply(one, tokens[1:2], ids, places[1:2])[0], together[1], atol=2e-5)
    assert together.shape == (3, 2, 5, 32) and together.dtype == jnp.float32


@pytest.mark.parametrize("arm", [*mixers.ARMS, "library"])
def test_arms_start_mimetic_as_the_librarys_layer_does(arm):
    if arm == "library":
        config = ModelConfig(width=24, dtype="float32", init="mimetic", kda=KDAConfig(num_heads=2, head_dim=16))
        layer = KDA(config).init(jax.random.key(0), jnp.zeros((1, 8, 24)))["params"]
        layer = {name: p["kernel"] if name.endswith("_proj") else p for name, p in layer.items()}
    else:
        layer = jax.tree.map(lambda p: p[0], mixers.init_params(0, SIZE, arm)["layers"])
    np.testing.assert_array_equal(layer["k_proj"], layer["q_proj"])
    np.testing.assert_array_equal(layer["o_proj"], np.asarray(layer["v_proj"]).T)
    for name, tap in (("q", -1), ("k", -2), ("v", -1)):
        assert np.mean(layer[f"{name}_conv"], axis=1).round().tolist() == np.eye(4)[tap].tolist()


def test_the_kda_arm_is_the_librarys_layer():
    layer = jax.tree.map(lambda p: p[0], mixers.init_params(0, SIZE, "kda")["layers"])
    config = ModelConfig(width=24, dtype="float32", kda=KDAConfig(num_heads=2, head_dim=16))
    names = ("q", "k", "v", "g", "b", "o", "f_a", "f_b")
    params = {name: layer[name] for name in ("a_log", "dt_bias", "o_norm", "q_conv", "k_conv", "v_conv")}
    params |= {f"{name}_proj": {"kernel": layer[f"{name}_proj"]} for name in names}
    x = jax.random.normal(jax.random.key(1), (2, 70, 24))
    runs = segments(70)
    normal = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    want = jax.jit(KDA(config).apply)({"params": params}, normal, runs)[0]
    got = jax.jit(lambda layer: mixers.apply_mixer(layer, x[None], runs, SIZE, "kda"))(jax.tree.map(lambda p: p[None], layer))[0] - x
    assert rms_ratio(got, want) < 1e-5
