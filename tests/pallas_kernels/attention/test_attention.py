"""Causal attention over packed documents: values and gradients against float64, masks, refusals, and the tiles that the kernels visit."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import UnsupportedError, attention, document_runs, first_visible
from pallas_kernels.attention.specs import unmet_by_shape
from pallas_kernels.attention.visible import key_ranges, query_ranges
from pallas_kernels.testing import outputs_and_gradients, rms_ratio


def documents(draw, batch, tokens, mean=9):
    """Segment ids with padding inside and behind."""
    ids = np.cumsum(draw.random((batch, tokens)) < 1 / mean, axis=1) + 1
    ids[draw.random((batch, tokens)) < 0.05] = 0
    return np.int32(ids)


def sees(ids):
    """[B, T, S] from the definition: an earlier token, or itself, with nothing but its own document between."""
    runs = np.asarray(document_runs(jnp.asarray(ids)))
    return (runs[:, :, None] == runs[:, None]) & (runs > 0)[:, None] & np.tril(np.ones((ids.shape[1],) * 2, bool))


def by_loops(q, k, v, mask, scale):
    """o and the largest logits, one query and head at a time, numpy float64."""
    o, largest = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[2], -np.inf)
    for b, t, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(mask[b, t])
        if keys.size:
            scores = scale * k[b, keys, h] @ q[b, t, h]
            weights = np.exp(scores - scores.max())
            o[b, t, h], largest[h] = weights / weights.sum() @ v[b, keys, h], max(largest[h], scores.max())
    return o, largest


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_against_loops(tokens):
    draw = np.random.default_rng(tokens)
    q, k, v = (draw.normal(size=(2, tokens, 3, width)) for width in (8, 8, 5))
    ids = documents(draw, 2, tokens)
    o, largest = attention(q, k, v, first=first_visible(document_runs(jnp.asarray(ids))), scale=0.4, precision=jax.lax.Precision.HIGHEST)
    want, want_largest = by_loops(q, k, v, sees(ids), 0.4)
    assert rms_ratio(o, want) < 1e-6
    np.testing.assert_allclose(np.maximum(largest, -1e30), np.maximum(want_largest, -1e30), rtol=1e-5)


def test_first_visible_is_the_definition():
    ids = documents(np.random.default_rng(3), 4, 60)
    first = np.asarray(first_visible(document_runs(jnp.asarray(ids))))
    positions = np.arange(60)
    np.testing.assert_array_equal((positions >= first[..., None]) & (positions <= positions[:, None]), sees(ids))
    assert np.all(np.diff(first) >= 0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.sampled_from([4, 8]), keys=st.sampled_from([4, 8, 16]), start=st.integers(0, 48), mean=st.sampled_from([2, 9, 1000]))
def test_ranges_are_the_tiles_that_meet(seed, rows, keys, start, mean):
    """Brute force over 64 keys and the 16 queries at `start`: a tile is in [begin, end) where any pair is seen, and in the inner range only where all are."""
    ids = documents(np.random.default_rng(seed), 2, 64, mean)
    mask = sees(ids)[:, start:start + 16]
    first = first_visible(document_runs(jnp.asarray(ids)))[:, start:start + 16]
    tiles = mask.reshape(2, 16 // rows, rows, 64 // keys, keys)
    some, every = tiles.any((2, 4)), tiles.all((2, 4))
    sides = [(key_ranges(first, jnp.int32(start), rows, keys, 64 // keys), some, every),
             (query_ranges(first, jnp.int32(start), rows, keys, 64 // keys), np.swapaxes(some, 1, 2), np.swapaxes(every, 1, 2))]
    for ranges, some, every in sides:
        begin, inner_begin, inner_end, end = (np.asarray(x)[..., None] for x in ranges)
        other = np.arange(some.shape[2])
        assert np.all((begin <= inner_begin) & (inner_begin <= inner_end) & (inner_end <= end) & (begin >= 0))
        assert not np.any(some & ~((other >= begin) & (other < end)))
        inner = (other >= inner_begin) & (other < inner_end)
        assert not np.any(inner & ~every)


def test_without_documents_every_inner_tile_is_free_of_masks():
    ranges = key_ranges(jnp.zeros((1, 64), jnp.int32), jnp.int32(0), 8, 8, 8)
    np.testing.assert_array_equal(ranges.inner_end[0], np.arange(8))
    np.testing.assert_array_equal(ranges.inner_begin, 0)


INTERPRETED = {
    "packed": (2, 256, 256, 0, 64, 64),
    "behind other tokens": (1, 70, 300, 200, 96, 64),
}
SLOW = {
    "at the very end": (1, 130, 300, 170, 64, 32),
    "wide": (1, 130, 130, 0, 192, 128),
    "one token": (2, 1, 1, 0, 32, 96),
    "128": (1, 128, 384, 256, 128, 128),
}


@pytest.mark.parametrize("case", [*INTERPRETED, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_kernels_in_the_interpreter(case):
    """Against float64 at the rounded inputs, races looked for. Head 1 is like head 0: the grid must keep them apart."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.attention import vjp
    batch, tokens, keys, start, key, value = (INTERPRETED | SLOW)[case]
    draw = np.random.default_rng(1)
    ids = documents(draw, batch, keys, mean=keys / 5)
    ids[0, keys // 2:keys // 2 + 40] = 0
    first = first_visible(document_runs(jnp.asarray(ids)))[:, start:start + tokens]
    rounded = lambda *shape: np.asarray(jnp.asarray(draw.normal(size=shape), jnp.bfloat16), np.float32)
    heads = 1 + (batch == 1)
    x = dict(q=rounded(batch, tokens, heads, key), k=rounded(batch, keys, heads, key), v=rounded(batch, keys, heads, value))
    cotangent = (rounded(batch, tokens, heads, value), np.zeros(heads, np.float32))
    scale = key ** -0.5
    want = outputs_and_gradients(functools.partial(attention, first=first, start=start, scale=scale, implementation="reference"), x, cotangent, jnp.float64)

    def kernels(**x):
        x = {name: a.astype(jnp.bfloat16) for name, a in x.items()}
        return vjp.attention(**x, first=first, start=jnp.int32(start), scale=scale, interpret=plgpu.InterpretGPUParams(detect_races=True))

    got = outputs_and_gradients(kernels, x, cotangent)
    assert rms_ratio(got[0][0], want[0][0]) < 5e-3
    np.testing.assert_allclose(got[0][1], want[0][1], rtol=1e-3)
    for name in x:
        assert rms_ratio(got[1][name], want[1][name]) < 8e-3, name


def test_nothing_to_see():
    """Padding alone, and arrays without tokens: zeros, and the lowest number as the largest logit."""
    x = jnp.ones((1, 4, 2, 8))
    o, largest = attention(x, x, x, first=first_visible(jnp.zeros((1, 4), jnp.int32)))
    assert not o.any() and np.all(largest == jnp.finfo(jnp.float32).min)
    empty = jnp.zeros((1, 0, 2, 8))
    assert attention(empty, empty, empty)[0].shape == (1, 0, 2, 8)


def test_refusals():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"k: got shape \(1, 4, 2, 7\)"):
        attention(x, x[..., :7], x)
    with pytest.raises(ValueError, match="v: got shape"):
        attention(x, x, x[:, :3])
    with pytest.raises(ValueError, match="first: got float32"):
        attention(x, x, x, first=jnp.zeros((1, 4)))
    with pytest.raises(UnsupportedError, match="wanted bfloat16 or float16"):
        attention(x, x, x, implementation="mosaic_gpu")
    assert not unmet_by_shape(key=192, value=128, dtypes=("bfloat16",) * 3)
    assert len(unmet_by_shape(key=80, value=256, dtypes=("bfloat16", "float32", "float32"))) == 3
