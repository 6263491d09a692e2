"""Grouped matmul against float64 products at the rounded inputs, with NaN wherever a value must not matter."""
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import UnsupportedError, grouped_matmul
from pallas_kernels.grouped_matmul import cases, specs, xla
from pallas_kernels.testing import rms_ratio

IMPLEMENTATIONS = ("xla", "reference")
CASES = {  # rows, K, N, group sizes
    "uneven, empty inside, dead tail": (37, 16, 24, [7, 0, 20, 1, 4]),
    "first and last empty": (300, 33, 17, [0, 0, 131, 169, 0]),
    "every remainder of 8": (260, 8, 40, [1, 10, 19, 28, 37, 46, 55, 64]),
    "around the tile": (900, 24, 16, [127, 128, 129, 255, 256, 1]),
    "one group takes all": (400, 16, 16, [0, 400, 0]),
    "one group": (150, 5, 7, [141]),
    "nothing live": (64, 8, 8, [0, 0, 0]),
    "more groups than rows": (9, 6, 10, [1 if g % 40 == 3 else 0 for g in range(320)]),
    "one row, one column": (3, 1, 1, [1, 1]),
}
BOUNDS = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}


inputs = functools.partial(cases.inputs, dtype="float32")


@functools.partial(jax.jit, static_argnames=("implementation", "preferred"))
def value_and_gradients(lhs, rhs, sizes, dout, implementation, preferred=None):
    f = lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, preferred_element_type=preferred, implementation=implementation)
    out, vjp = jax.vjp(f, lhs, rhs)
    return out, *vjp(dout.astype(out.dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, implementation):
    args, want = inputs(*CASES[case])
    got = value_and_gradients(*args, implementation)
    live = sum(CASES[case][3])
    for name, g, w in zip(("out", "dlhs", "drhs"), got, want):
        assert g.dtype == jnp.float32 and rms_ratio(g, w) < BOUNDS["float32"], name
    for rows in got[:2]:
        assert not np.any(np.asarray(rows[live:]))
    assert not np.any(np.asarray(got[2])[np.asarray(CASES[case][3]) == 0])


@pytest.mark.parametrize("preferred", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_once(dtype, preferred):
    args, want = inputs(*CASES["around the tile"], dtype=dtype)
    got = value_and_gradients(*args, "xla", preferred)
    assert [x.dtype.name for x in got] == [preferred or dtype, dtype, dtype]
    for g, w, kind in zip(got, want, (preferred or dtype, dtype, dtype)):
        assert rms_ratio(g, w) < BOUNDS[kind]


def test_mixed_dtypes():
    args, want = inputs(*CASES["every remainder of 8"], dtype="bfloat16")
    got = value_and_gradients(args[0], args[1].astype(jnp.float32), *args[2:], "xla")
    assert [x.dtype.name for x in got] == ["float32", "bfloat16", "float32"]
    for g, w in zip(got, want):
        assert rms_ratio(g, w) < BOUNDS[g.dtype.name]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64_accumulates_in_float64(implementation):
    with jax.enable_x64(True):
        args, want = inputs(*CASES["first and last empty"], dtype="float64")
        for g, w in zip(value_and_gradients(*args, implementation), want):
            assert g.dtype == jnp.float64 and rms_ratio(g, w) < 1e-14


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_stays_in_its_group(implementation):
    args, want = inputs(60, 8, 8, [20, 21, 19])
    got = value_and_gradients(args[0].at[25].set(jnp.nan), *args[1:], implementation)
    keep = np.arange(60) != 25
    assert rms_ratio(got[0][keep], want[0][keep]) < 1e-6 and rms_ratio(got[1], want[1]) < 1e-6
    assert np.isnan(got[2][1]).all() and rms_ratio(got[2][::2], want[2][::2]) < 1e-6


@given(cuts=st.lists(st.integers(0, 300), min_size=6, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_split(cuts):
    sizes = np.diff([0, *sorted(cuts)]).tolist()
    args, want = inputs(300, 12, 20, sizes)
    for g, w in zip(value_and_gradients(*args, "xla"), want):
        assert rms_ratio(g, w) < BOUNDS["float32"]


@given(sizes=st.lists(st.integers(0, 100), min_size=7, max_size=7), tile=st.sampled_from([1, 8, 128]))
@example(sizes=[9, 1, 1, 1, 1, 1, 1], tile=8)
@settings(max_examples=60, deadline=None)
def test_schedule_covers_each_live_row_once(sizes, tile):
    """The loop runs `live` times, so that dead rows cost nothing; the static bound is never exceeded."""
    rows = 700
    schedule = jax.jit(xla.make_schedule, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), rows, tile)
    group, start, stop, live = map(np.asarray, schedule)
    assert live == sum(-(-size // tile) for size in sizes) <= len(group) == specs.max_tiles(rows, len(sizes), tile)
    covered = [(r, g) for g, a, b in zip(group[:live], start[:live], stop[:live]) for r in range(a, b)]
    assert covered == list(enumerate(np.repeat(np.arange(len(sizes)), sizes)))


@pytest.mark.parametrize("rows,groups,cpu,gpu", [(0, 4, 0, 0), (5, 3, 5, 5), (800, 16, 64, 128), (8192, 16, 128, 512), (262144, 64, 128, 2048)])
def test_tile_follows_the_average_group(rows, groups, cpu, gpu):
    assert (specs.tile_rows(rows, groups, "cpu"), specs.tile_rows(rows, groups, "gpu")) == (cpu, gpu)


def test_sizes_beyond_the_rows_are_cut_off():
    lhs, rhs = jnp.ones((10, 4)), jnp.ones((2, 4, 3))
    np.testing.assert_array_equal(grouped_matmul(lhs, rhs, jnp.array([7, 2**30], jnp.int32), implementation="xla"), 4 * np.ones((10, 3)))


@pytest.mark.parametrize("rows,k,n", [(0, 8, 4), (5, 0, 4), (5, 8, 0)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_dimensions(rows, k, n, implementation):
    sizes = jnp.array([min(rows, 2), 0], jnp.int32)
    got = value_and_gradients(jnp.ones((rows, k)), jnp.ones((2, k, n)), sizes, jnp.ones((rows, n)), implementation)
    assert [x.shape for x in got] == [(rows, n), (rows, k), (2, k, n)]
    assert not any(np.any(np.asarray(x)) for x in got)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)])
def test_vmap_is_a_loop_over_the_batch(axes):
    sizes = jnp.array([[7, 0, 20], [0, 30, 0], [1, 1, 1]], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = jax.random.normal(keys[0], (3, 30, 6)), jax.random.normal(keys[1], (3, 3, 6, 10))
    args = [x if axis == 0 else x[0] for x, axis in zip((lhs, rhs, sizes), axes)]
    one = lambda lhs, rhs, sizes: value_and_gradients(lhs, rhs, sizes, jnp.ones((30, 10)), "xla")
    got = jax.vmap(one, in_axes=axes)(*args)
    for i in range(3):
        want = one(*(x[i] if axis == 0 else x for x, axis in zip(args, axes)))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5), [g[i] for g in got], list(want))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
def test_shard_map(replicated, check_vma):
    """Every device has its own rows and sizes; a replicated weight's gradient is the sum over devices."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sizes = jnp.array([[7, 0, 20], [0, 30, 0], [1, 1, 1], [0, 0, 0]], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = jax.random.normal(keys[0], (4, 30, 6)), jax.random.normal(keys[1], (4, 3, 6, 10))
    rhs = rhs[:1].repeat(4, 0) if replicated else rhs

    def total(multiply, lhs, rhs):
        return jnp.sum(jnp.sin(multiply(lhs.reshape(120, 6), rhs[0] if replicated else rhs.reshape(12, 6, 10), sizes.reshape(12))))

    spec = (P("expert"), P() if replicated else P("expert"), P("expert"))
    sharded = jax.shard_map(grouped_matmul, mesh=mesh, in_specs=spec, out_specs=P("expert"), check_vma=check_vma)
    plain = lambda l, r, s: jnp.concatenate([
        grouped_matmul(l[30 * i:30 * i + 30], r if replicated else r[3 * i:3 * i + 3], s[3 * i:3 * i + 3], implementation="reference") for i in range(4)])
    got, want = (jax.jit(jax.grad(functools.partial(total, f), (0, 1)))(lhs, rhs) for f in (sharded, plain))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5), got, want)


def test_outside_shard_map_a_sharded_operand_works_too():
    args, want = inputs(*CASES["around the tile"])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    out = jax.jit(grouped_matmul)(jax.device_put(args[0], NamedSharding(mesh, P("data"))), *args[1:3])
    assert rms_ratio(out, want[0]) < BOUNDS["float32"]


def test_checkpoint_scan_and_repeated_runs_agree_to_the_bit():
    args, _ = inputs(60, 24, 16, [20, 0, 40])
    layer = lambda h, w: (jnp.tanh(grouped_matmul(h, w, args[2])) @ jnp.ones((16, 24)) / 16, None)
    loss = lambda body, w: jnp.sum(jax.lax.scan(body, args[0], w)[0] ** 2)
    weights = jnp.stack([args[1], args[1][::-1]])
    gradient = lambda body: jax.jit(jax.grad(functools.partial(loss, body)))(weights)
    first = gradient(layer)
    np.testing.assert_array_equal(first, gradient(layer))
    np.testing.assert_allclose(first, gradient(jax.checkpoint(layer)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change,message", [
    (dict(lhs=jnp.ones((2, 5, 4))), r"lhs: got shape \(2, 5, 4\), wanted \[M, K\]"),
    (dict(rhs=jnp.ones((4, 3))), r"rhs: got shape \(4, 3\), wanted \[G, K, N\]"),
    (dict(rhs=jnp.ones((2, 5, 3))), r"rhs: got K=5 .* wanted K=4"),
    (dict(rhs=jnp.ones((0, 4, 3)), group_sizes=jnp.ones(0, jnp.int32)), "at least one group"),
    (dict(group_sizes=jnp.ones(3, jnp.int32)), r"group_sizes: got shape \(3,\), wanted \[2\]"),
    (dict(group_sizes=jnp.ones(2)), "group_sizes: got dtype float32, wanted int32"),
    (dict(lhs=jnp.ones((10, 4), jnp.int32)), "lhs: got dtype int32"),
    (dict(preferred_element_type=jnp.int32), "preferred_element_type: got int32"),
    (dict(implementation="cutlass"), "implementation: got 'cutlass'"),
])
def test_errors_name_the_argument(change, message):
    call = dict(lhs=jnp.ones((10, 4)), rhs=jnp.ones((2, 4, 3)), group_sizes=jnp.ones(2, jnp.int32)) | change
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**call)


def test_mosaic_gpu_refuses_with_every_reason():
    call = jnp.ones((10, 40)), jnp.ones((2, 40, 128)), jnp.ones(2, jnp.int32)
    with pytest.raises(UnsupportedError) as refusal:
        grouped_matmul(*call, implementation="mosaic_gpu")
    for reason in ("device: got cpu, wanted a Hopper GPU", "bfloat16", "M to be a positive multiple of 8, got 10; nearest: 16", "K to be",
                   "got 40; nearest: 64"):
        assert reason in str(refusal.value)
    assert "N to be" not in str(refusal.value)
    assert grouped_matmul(*call, implementation=("mosaic_gpu", "reference")).shape == (10, 128)
