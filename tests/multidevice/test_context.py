"""The operators of a sequence that several devices share out equal those of one device, and no document hears of another.

Decay is slow here: fast decay hides what leaks from one document or one rank into the next.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import on_mesh, packed_rows

import pallas_kernels
from longmoe.configs import MeshConfig
from longmoe.model.latent_attention import expand, latent_attention
from longmoe.model.mla import causal_attention
from longmoe.parallel import context
from longmoe.parallel.mesh import make_mesh
from pallas_kernels import document_runs
from pallas_kernels.testing import outputs_and_gradients, rms_ratio

MESHES = {"context 8": MeshConfig(fsdp=1, context=8), "context 2, tensor 2, expert 2": MeshConfig(fsdp=1, expert=2, tensor=2, context=2),
          "tensor 2, fsdp 4": MeshConfig(fsdp=4, tensor=2), "context 4, data 2": MeshConfig(data=2, fsdp=1, context=4)}
SLOW = {name: pytest.param(name, marks=pytest.mark.exhaustive) for name in MESHES}
OWN, HEADS, WIDTH = 8, 2, 8
"""Tokens a rank, heads, channels a head."""
KDA = dict(gate="bounded", lower_bound=-5.0, beta_logits=True, qk_l2norm=True, implementation="xla")


@functools.cache
def mesh_of(name):
    return make_mesh(MESHES[name])


@functools.cache
def kda_inputs(own=OWN):
    """Raw arguments of KDA with log decays near -0.005: over the longest document the state keeps most of what was written."""
    draw = np.random.default_rng(0)
    ids = packed_rows(own)
    normal = lambda *shape: draw.normal(size=(*ids.shape, HEADS, *shape)).astype(np.float32)
    x = dict(q=normal(WIDTH), k=normal(WIDTH), v=normal(WIDTH), g=normal(WIDTH) - 7, beta=normal())
    return x | dict(a_log=draw.normal(size=HEADS).astype(np.float32) / 4, dt_bias=draw.normal(size=(HEADS, WIDTH)).astype(np.float32) / 4), ids


def kda(runs, residuals="recompute", **x):
    return context.sharded_kda(**x, runs=runs, residuals=residuals, **KDA)


def compare(function, x, runs, mesh, bound=1e-5):
    """Outputs and all gradients of function(runs=runs, **x) on the mesh against one device, for a random sum of the outputs."""
    cotangent = np.random.default_rng(1).normal(size=jax.eval_shape(function, runs=runs, **x).shape).astype(np.float32)
    want, want_gradients = outputs_and_gradients(function, x | dict(runs=runs), cotangent)
    got, gradients = outputs_and_gradients(on_mesh(mesh, function), x | dict(runs=runs), cotangent)
    errors = {"output": rms_ratio(got, want)} | {name: rms_ratio(gradients[name], wanted) for name, wanted in want_gradients.items()}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert set(want_gradients) == set(x) and all(np.any(g != 0) for g in want_gradients.values())
    assert all(error < bound for error in errors.values()), errors
    return got, gradients


@pytest.mark.parametrize("name", ["context 8", *list(SLOW.values())[1:]])
def test_kda_and_every_gradient(name):
    x, ids = kda_inputs()
    runs = np.asarray(document_runs(ids))
    # Whatever padding holds reaches nothing.
    x = {n: np.where((runs == 0).reshape(*runs.shape, *(1,) * (v.ndim - 2)), np.nan, v) if v.ndim > 2 else v for n, v in x.items()}
    got, gradients = compare(kda, x, runs, mesh_of(name))
    assert (got[runs == 0] == 0).all() and (gradients["k"][runs == 0] == 0).all()


@pytest.mark.exhaustive
def test_kda_of_rows_that_are_one_document():
    x, _ = kda_inputs()
    compare(lambda runs, **x: kda(None, **x), x, np.zeros((1, 8), np.int32), mesh_of("context 8"))


def others_change(function, x, name, ids, token):
    """Largest change of function's output outside and inside the document of `token` = (row, position) when x[name] changes there."""
    changed = x[name].copy()
    changed[token] += 3
    difference = np.abs(np.asarray(function(**(x | {name: changed}))) - np.asarray(function(**x)))
    difference = difference.reshape(*ids.shape, -1).max(-1)
    runs = np.asarray(document_runs(ids))
    inside = (runs == runs[token]) & (np.arange(len(ids)) == token[0])[:, None]
    return difference[~inside].max(), difference[inside][token[1] - np.flatnonzero(inside[token[0]])[0] + 1:].max(initial=0)


def test_kda_documents_are_apart_to_the_bit(monkeypatch):
    x, ids = kda_inputs()
    runs = np.asarray(document_runs(ids))
    run = jax.jit(on_mesh(mesh_of("context 8"), functools.partial(kda, runs)))
    # Last token of a document that ends on an edge; middle of one over three ranks; last before a rank of padding, whose id comes back behind it.
    for token in ((0, OWN - 1), (0, OWN + 2), (3, OWN - 1)):
        outside, inside = others_change(run, x, "v", ids, token)
        assert outside == 0 and (inside > 0.1) == (token == (0, OWN + 2)), (token, outside, inside)
    monkeypatch.setattr(context, "_continues", lambda first, last: jnp.ones(first.shape, bool))
    # Other residuals: a call that was traced before would come out of the cache, with its reset.
    leaking = jax.jit(on_mesh(mesh_of("context 8"), functools.partial(kda, runs, "save")))
    outside, _ = others_change(leaking, x, "v", ids, (0, OWN - 1))
    assert outside > 0.1, "without the reset at a document that begins with a rank this test must fail"


CONV = ("q", "k", "v")


def convolutions(runs, **x):
    return jnp.stack(context.sharded_convolutions(pallas_kernels.short_conv, [x[n] for n in CONV], [x[f"{n}_taps"] for n in CONV], runs))


@pytest.mark.parametrize("own", [OWN, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_convolutions(own):
    ids = packed_rows(own)
    draw, runs = np.random.default_rng(2), np.asarray(document_runs(ids))
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    x = {n: normal(*ids.shape, 6) for n in CONV} | {f"{n}_taps": normal(4, 6) for n in CONV}
    compare(convolutions, x, runs, mesh_of("context 8"))
    run = jax.jit(on_mesh(mesh_of("context 8"), lambda **x: jnp.moveaxis(convolutions(runs, **x), 0, -1)))
    outside, inside = others_change(run, x, "q", ids, (0, own - 1))
    assert outside == 0 and inside == 0
    outside, inside = others_change(run, x, "q", ids, (0, 2 * own - 1))                 # the next rank needs it
    assert outside == 0 and inside > 0.1
    compare(lambda runs, **x: convolutions(None, **x), x, runs, mesh_of("context 2, tensor 2, expert 2" if own > 2 else "context 8"))


@functools.cache
def attention_inputs():
    ids = packed_rows(OWN)
    draw = np.random.default_rng(3)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    return dict(q=normal(*ids.shape, HEADS, 12), latent=normal(*ids.shape, 10), kv_b=normal(6, HEADS, 8 + 5)), ids


ATTENTION = functools.partial(latent_attention, scale=0.3, precision=jax.lax.Precision.HIGHEST, query_chunk=3, key_chunk=7, return_max_logits=True)


def attention(runs, q, latent, kv_b):
    return context.sharded_attention(ATTENTION, q, latent, kv_b, runs)


def whole_attention(runs, q, latent, kv_b):
    keys, values = expand(latent, kv_b, q.shape[-1], jax.lax.Precision.HIGHEST)
    return causal_attention(q, keys, values, 0.3, runs, jax.lax.Precision.HIGHEST, return_max_logits=True)


@pytest.mark.parametrize("name", ["context 8", *[SLOW[n] for n in ("context 2, tensor 2, expert 2", "context 4, data 2")]])
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_attention(name, packed):
    x, ids = attention_inputs()
    runs = np.asarray(document_runs(ids))
    call = lambda f: lambda runs, **x: f(runs if packed else None, **x)
    cotangents = np.random.default_rng(4).normal(size=(*x["q"].shape[:3], 5)).astype(np.float32), np.zeros(HEADS, np.float32)
    (want, want_largest), want_gradients = outputs_and_gradients(call(whole_attention), x | dict(runs=runs), cotangents)
    (got, largest), gradients = outputs_and_gradients(on_mesh(mesh_of(name), call(attention)), x | dict(runs=runs), cotangents)
    assert rms_ratio(got, want) < 1e-5 and all(rms_ratio(gradients[n], want_gradients[n]) < 1e-5 for n in x)
    np.testing.assert_allclose(largest, want_largest, rtol=1e-6)


def test_attention_documents_are_apart_to_the_bit():
    x, ids = attention_inputs()
    runs = document_runs(ids)
    run = jax.jit(on_mesh(mesh_of("context 8"), lambda **x: attention(runs, **x)[0]))
    for token in ((0, OWN - 1), (3, OWN - 1)):
        outside, _ = others_change(run, x, "latent", ids, token)
        assert outside == 0
    outside, inside = others_change(run, x, "latent", ids, (0, OWN + 2))
    assert outside == 0 and inside > 0.1


def test_refusals():
    x, ids = kda_inputs()
    runs = np.asarray(document_runs(ids))
    call = lambda mesh_config, function, x, runs: jax.eval_shape(on_mesh(make_mesh(mesh_config), function), runs, **x)
    with pytest.raises(ValueError, match=r"kda.num_heads: got 2, wanted a multiple of 4, the devices along mesh axis 'tensor'"):
        call(MeshConfig(fsdp=2, tensor=4), lambda runs, **x: kda(runs, **x), x, runs)
    with pytest.raises(ValueError, match="mla.num_heads: got 2, wanted a multiple of 4"):
        call(MeshConfig(fsdp=1, context=2, tensor=4), lambda runs, **x: attention(runs, **x), attention_inputs()[0], runs)
    with pytest.raises(ValueError, match="rows of a batch: got 4, wanted a multiple of 8, the devices along mesh axes data, fsdp, expert"):
        call(MeshConfig(fsdp=8), lambda runs, **x: kda(runs, **x), x, runs)
    short = {n: v[:, :-3] if v.ndim > 2 else v for n, v in x.items()}
    with pytest.raises(ValueError, match="tokens of a row: got 61, wanted a multiple of 8, the devices along mesh axis 'context'"):
        call(MeshConfig(fsdp=1, context=8), lambda runs, **x: kda(runs, **x), short, runs[:, :-3])
