"""The k largest of each row: every implementation against a stable sort, and the Hopper kernel in the interpreter with race detection."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, top_k
from pallas_kernels.top_k import mosaic_gpu, specs


def awkward(rows, columns):
    """Rows of ties, of infinities, of NaN, all alike; no -0."""
    draw = np.random.default_rng(rows + columns)
    x = draw.standard_normal((rows, columns)).astype(np.float32)
    x[::4] = np.round(x[::4] * 2) + 0.0
    x[1, : columns // 2], x[2, 1:], x[3], x[5, ::2] = np.nan, -np.inf, 0.25, np.inf
    return x


def by_sorting(x, k):
    keys = np.where(np.isnan(x), np.inf, x)
    return np.argsort(-keys, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shape,k", [((8, 12), 1), ((8, 12), 12), ((9, 7), 3), ((0, 4), 2)])
def test_is_a_stable_sort(implementation, shape, k):
    x = awkward(*shape) if shape[0] else np.zeros(shape, np.float32)
    x[np.isinf(x) & (x > 0)] = 9.0                          # NaN and infinity are alike to the kernel alone
    values, ids = top_k(x, k, implementation=implementation)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, by_sorting(np.where(np.isnan(x), 10.0, x), k))
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(ids), axis=1))


@given(st.integers(1, 30), st.data())
@settings(max_examples=40, deadline=None)
def test_any_sizes_and_ties(columns, data):
    k = data.draw(st.integers(1, columns))
    x = np.array(data.draw(st.lists(st.lists(st.integers(-2, 2), min_size=columns, max_size=columns), min_size=1, max_size=3)), np.float32)
    for implementation in ("xla", "reference"):
        np.testing.assert_array_equal(top_k(x, k, implementation=implementation)[1], by_sorting(x, k))


def test_carries_no_gradient():
    assert not np.any(jax.grad(lambda x: jnp.sum(top_k(x, 2, implementation="xla")[0]))(jnp.arange(8.0).reshape(2, 4)))


def test_refusals():
    x = jnp.zeros((64, 16))
    for k in (0, 17):
        with pytest.raises(ValueError, match=rf"k: got {k}, wanted 1 to 16"):
            top_k(x, k)
    with pytest.raises(ValueError, match=r"x: got int32 \(4, 4\), wanted numbers"):
        top_k(jnp.zeros((4, 4), jnp.int32), 2)
    with pytest.raises(UnsupportedError, match="wanted a Hopper GPU"):
        top_k(x, 2, implementation="mosaic_gpu")
    assert not specs.unmet_by_shape(rows=64, columns=896, k=17, dtype=jnp.float32)
    assert len(specs.unmet_by_shape(rows=63, columns=12, k=33, dtype=jnp.bfloat16)) == 4


@pytest.mark.parametrize("columns,width", [(8, 8), (112, 112), (896, 128), (136, 8), (264, 88)])
def test_chunks_divide_the_columns(columns, width):
    assert specs.chunk_width(columns) == width and columns % width == 0


# One chunk; a chunk narrower than k; several chunks with the ring used twice; columns that are no multiple of 128.
@pytest.mark.parametrize("columns,k", [(112, 9), (8, 8), (136, 17), (512, 17), (48, 1)])
def test_kernel_in_the_interpreter(columns, k, no_races):
    x = awkward(64, columns)
    got = mosaic_gpu.top_k_ids(jnp.asarray(x), k, interpret=plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_array_equal(got, by_sorting(x, k))
