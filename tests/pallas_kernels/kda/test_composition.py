"""One token at a time, in pieces, as affine maps of the state, and under JAX's transformations: always the same operator."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import kda, kda_segment, kda_step
from pallas_kernels.kda import specs

RAW = dict(gate="bounded", lower_bound=-4.0, qk_l2norm=True, beta_logits=True)
close = partial(np.testing.assert_allclose, atol=3e-6, rtol=1e-5)


def raw_inputs(tokens=70, batch=2, heads=2):
    x = specs.inputs(specs.Shape(batch, tokens, heads, 8, 12))
    return {**x, "a_log": np.linspace(-0.2, 0.3, heads, dtype=np.float32), "dt_bias": 0.1 * np.ones((heads, 8), np.float32)}


def at(x, piece):
    return {n: v if n in ("a_log", "dt_bias", "initial_state") else v[:, piece] for n, v in x.items()}


def loss(x, **keywords):
    o, state = kda(**x, **RAW, **keywords)
    return jnp.sum(o ** 2) + jnp.sum(jnp.sin(state))


def test_steps_are_the_whole():
    x = raw_inputs(tokens=20)
    o, final = kda(**x, **RAW, scale=0.4)
    state = jnp.asarray(x.pop("initial_state"))
    step = jax.jit(lambda x, state: kda_step(**x, state=state, **RAW, scale=0.4))
    for t in range(20):
        out, state = step(at(x, t), state)
        close(out, o[:, t])
    close(state, final)
    out, state = kda_step(**{n: jnp.asarray(v, jnp.bfloat16) for n, v in at(x, 0).items()}, state=state, **RAW)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32


@pytest.mark.parametrize("cut", [37, 64])
def test_pieces_with_carried_state_are_the_whole(cut):
    x = raw_inputs()
    o, final = kda(**x, **RAW)
    first, state = kda(**at(x, slice(cut)), **RAW)
    second, state = kda(**{**at(x, slice(cut, None)), "initial_state": state}, **RAW)
    close(jnp.concatenate([first, second], axis=1), o)
    close(state, final)


@pytest.mark.slow
def test_segments_compose_and_differentiate():
    x = raw_inputs()
    start = x["initial_state"]
    inputs = {n: v for n, v in x.items() if n not in ("q", "initial_state")}
    ids = np.repeat([1, 0, 2, 0], [30, 5, 20, 15])[None].repeat(2, 0).astype(np.int32)
    apply = lambda m, b, s: jnp.einsum("bhij,bhjv->bhiv", m, s, precision="highest") + b

    def by_pieces(inputs):
        (m1, b1), (m2, b2) = (kda_segment(**at(inputs, piece), **RAW) for piece in (slice(37), slice(37, None)))
        return apply(m2, b2, apply(m1, b1, start))

    final = lambda inputs: kda(jnp.zeros_like(inputs["k"]), **inputs, **RAW, initial_state=start)[1]
    (got, pull), (want, pull_want) = jax.vjp(by_pieces, inputs), jax.vjp(final, inputs)
    close(got, want)
    cotangent = jnp.cos(want)
    jax.tree.map(partial(close, atol=1e-5), pull(cotangent)[0], pull_want(cotangent)[0])
    m, b = kda_segment(**inputs, **RAW, segment_ids=ids)
    assert m.dtype == b.dtype == jnp.float32 and not np.asarray(m).any()      # a second document: nothing of the start is left
    close(b, kda(**x, **RAW, segment_ids=ids)[1])


@pytest.mark.slow
def test_jit_checkpoint_and_vmap():
    x = raw_inputs(batch=2)
    value, gradients = jax.jit(jax.value_and_grad(loss))(x)
    again, by_checkpoint = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(x)
    close(again, value)
    jax.tree.map(close, by_checkpoint, gradients)
    shared = ("a_log", "dt_bias")
    one = {n: v if n in shared else v[:, None] for n, v in x.items()}
    axes = {n: None if n in shared else 0 for n in x}
    mapped = jax.jit(jax.grad(lambda one: jnp.sum(jax.vmap(loss, (axes,))(one))))(one)
    jax.tree.map(lambda a, b: close(np.reshape(a, np.shape(b)), b, atol=1e-5), mapped, gradients)


@pytest.mark.parametrize("axis", ["batch", "head"])
def test_shard_map(axis):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    x = raw_inputs()
    ids = np.repeat([1, 2], [30, 40])[None].repeat(2, 0).astype(np.int32)
    position = dict(q=2, k=2, v=2, g=2, beta=2, initial_state=1, a_log=0, dt_bias=0)
    if axis == "batch":
        position = {**dict.fromkeys(position, 0), "a_log": None, "dt_bias": None}
    spec = {n: PartitionSpec() if p is None else PartitionSpec(*(None,) * p, "x") for n, p in position.items()}
    ids_spec = PartitionSpec("x") if axis == "batch" else PartitionSpec()

    if axis == "batch":             # the zero state that `kda` makes by itself does not vary over the mesh yet
        x.pop("initial_state"), spec.pop("initial_state")
    state_spec = PartitionSpec("x") if axis == "batch" else PartitionSpec(None, "x")
    run = lambda x, ids: kda(**x, **RAW, segment_ids=ids, implementation="xla")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec, ids_spec), out_specs=(spec["q"], state_spec))
    total = lambda f: jax.jit(jax.value_and_grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in f(x, ids))))
    (value, gradients), (want, want_gradients) = total(sharded)(x), total(run)(x)
    close(value, want)
    jax.tree.map(partial(close, atol=1e-5), gradients, want_gradients)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shape", [(2, 0, 2), (0, 5, 2), (2, 5, 0)])
def test_empty(shape, implementation):
    x = specs.inputs(specs.Shape(*shape, 8, 12), ("random",) * shape[0] if shape[0] else "random") if shape[0] else {
        n: np.zeros((0, *v.shape[1:]), np.float32) for n, v in specs.inputs(specs.Shape(1, *shape[1:], 8, 12)).items()}
    o, state = kda(**x, implementation=implementation)
    assert o.shape == (*shape, 12)
    np.testing.assert_array_equal(state, x["initial_state"])
    gradients = jax.grad(lambda x: jnp.sum(kda(**x, implementation=implementation)[1]))(x)
    assert (np.asarray(gradients["initial_state"]) == 1).all()
