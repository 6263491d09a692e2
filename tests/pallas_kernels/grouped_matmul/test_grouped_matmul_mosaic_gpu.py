"""The Hopper kernels in Mosaic GPU's interpreter, which simulates copies, barriers and warpgroups on a CPU and looks for races."""
import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the interpreter's findings have no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import cases, mosaic_gpu, schedule, specs, tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weights_matmul
from pallas_kernels.testing import rms_ratio

FAST = ("uneven, empty inside, dead tail", "around 64", "one row")
NAMES = ("out", "dlhs", "drhs")
BOUNDS = {"bfloat16": 3e-3, "float16": 6e-4, "float32": 2e-6}
SMALL = mosaic_gpu.Plan(forward=tiles.RowTiles(), dlhs=tiles.RowTiles(cols=128), drhs=tiles.WeightTiles(cols=128), sms=2,
                        interpret=plgpu.InterpretGPUParams(detect_races=True))
"""Two blocks only, so that each works on several items and its barriers go round."""


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """What a failed run leaves behind would fail the next one."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def run(arguments, plan=SMALL, out_dtype="bfloat16"):
    lhs, rhs, sizes, dout = arguments
    out, vjp = jax.vjp(lambda lhs, rhs: mosaic_gpu.grouped_matmul(lhs, rhs, sizes, jnp.dtype(out_dtype), plan), lhs, rhs)
    results = jax.tree.map(np.asarray, (out, *vjp(dout.astype(out.dtype))))
    assert not gpu_callbacks.get_races().races_found
    return results


def check(case, plan=SMALL, dtype="bfloat16", out_dtype=None, **how):
    arguments, want = cases.inputs(*case, dtype=dtype, **how)
    got = run(arguments, plan, out_dtype or dtype)
    for name, g, w in zip(NAMES, got, want):
        assert g.dtype.name == (out_dtype or dtype if name == "out" else dtype)
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w), err_msg=name)
        assert rms_ratio(np.nan_to_num(g.astype(np.float64)), np.nan_to_num(w)) < BOUNDS[g.dtype.name], name
    live = sum(case[3])
    assert not np.any(got[0][live:]) and not np.any(got[1][live:]) and not np.any(got[2][np.asarray(case[3]) == 0])
    return got


@pytest.mark.parametrize("case", [case if case in FAST else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases.CASES])
def test_values_and_gradients(case):
    check(cases.CASES[case])


def test_nan_stays_in_its_group():
    check((152, 64, 64, [20, 0, 61, 60]), poisoned=2)


def check_weights(case, choice, out_dtype="bfloat16", poisoned=None):
    """The gradient of rhs alone."""
    (lhs, _, sizes, dout), (_, _, want) = cases.inputs(*case, poisoned=poisoned)
    got = np.asarray(weights_matmul(lhs, dout, sizes, jnp.dtype(out_dtype), choice, sms=2, interpret=SMALL.interpret)).astype(np.float64)
    assert not gpu_callbacks.get_races().races_found
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert rms_ratio(np.nan_to_num(got), np.nan_to_num(want)) < BOUNDS[out_dtype]


SHALLOW = tiles.WeightTiles(depth=32, stages=8, lag=3)


@pytest.mark.parametrize("choice", [SMALL.drhs, SHALLOW], ids=["64 deep", "32 deep"])
@pytest.mark.parametrize("poisoned", [None, 0, 1, 2, 3])
def test_groups_that_end_in_each_16_rows_of_a_step(choice, poisoned):
    rows, k, n, sizes = cases.CASES["every tail of a step"]
    ends = np.cumsum(sizes)
    stops = ends - (ends - sizes) // 8 * 8
    np.testing.assert_array_equal((stops - 1) % 64 // 16, [0, 1, 2, 3])
    check_weights((rows, k, n, sizes), choice, poisoned=poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [tiles.WeightTiles(), SHALLOW], ids=["64 deep", "32 deep"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_results_of_more_strips_than_steps(choice, out_dtype):
    check_weights((392, 64, 320, [7, 0, 150, 1, 64, 0, 170]), choice, out_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype,out_dtype", [("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32")])
def test_dtypes(dtype, out_dtype):
    check(cases.CASES["uneven, empty inside, dead tail"], dtype=dtype, out_dtype=out_dtype)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("label,changes", {
    "neighbours along rows": dict(forward=tiles.RowTiles(cluster_along="rows", band=1), dlhs=tiles.RowTiles(cols=64, cluster_along="rows"),
                                  drhs=tiles.WeightTiles(rows=64, split="cols", cluster_along="rows")),
    "neighbours along columns": dict(forward=tiles.RowTiles(cols=128, cluster_along="cols"), dlhs=tiles.RowTiles(cols=64, cluster_along="cols"),
                                     drhs=tiles.WeightTiles(cols=128, cluster_along="cols")),
    "tall": dict(forward=tiles.RowTiles(rows=256, cols=128, out_slots=1), dlhs=tiles.RowTiles(rows=256, cols=192, stages=3, out_slots=1),
                 drhs=tiles.WeightTiles(rows=256, cols=128, out_slots=1)),
    "short, columns shared out": dict(forward=tiles.RowTiles(rows=64, split="cols", stages=5, out_slots=1),
                                      dlhs=tiles.RowTiles(rows=64, cols=128, split="cols"),
                                      drhs=tiles.WeightTiles(rows=64, cols=256, split="cols", stages=5, lag=3)),
    "odd number of strips": dict(forward=tiles.RowTiles(cols=192), dlhs=tiles.RowTiles(cols=64), drhs=tiles.WeightTiles(cols=192, stages=3, lag=1)),
}.items())
def test_tiles(label, changes):
    check((304, 128, 256, [7, 0, 150, 1, 64]), dataclasses.replace(SMALL, sms=4, **changes))


@pytest.mark.slow
def test_gradients_agree_with_the_reference_and_repeat_to_the_bit():
    arguments, _ = cases.inputs(*cases.CASES["first and last empty"])
    got, again = run(arguments), run(arguments)
    lhs, rhs, sizes, dout = arguments
    out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, implementation="reference"), lhs, rhs)
    for g, a, w in zip(got, again, (out, *vjp(dout))):
        np.testing.assert_array_equal(g, a)
        assert rms_ratio(g, w) < BOUNDS["bfloat16"]


@given(sizes=st.lists(st.integers(0, 300), min_size=5, max_size=5), tile=st.sampled_from([64, 128]), col_tiles=st.integers(1, 3), band=st.integers(1, 4))
@example(sizes=[1, 1, 1, 1, 1], tile=64, col_tiles=2, band=3)
@example(sizes=[0, 0, 0, 0, 0], tile=64, col_tiles=1, band=1)
@settings(max_examples=60, deadline=None)
def test_row_schedule_covers_each_live_row_once(sizes, tile, col_tiles, band):
    rows = 1600
    plan = jax.jit(schedule.row_schedule, static_argnums=(1, 2, 3, 4))(jnp.asarray(sizes, jnp.int32), rows, tile, col_tiles, band)
    last, ends, group, row, col, low, high = map(np.asarray, plan)
    live = last[-1] * col_tiles
    assert live <= len(group) == schedule.max_row_tiles(rows, len(sizes), tile) * col_tiles and ends[-1] == sum(sizes)
    assert np.all(row[:live] % schedule.ROW_ALIGNMENT == 0) and np.all(high[:live] > low[:live]) and np.all(high[:live] <= tile)
    covered = sorted((r, c, g) for g, at, c, a, b in zip(group[:live], row[:live], col[:live], low[:live], high[:live]) for r in range(at + a, at + b))
    assert covered == [(r, c, g) for r, g in enumerate(np.repeat(np.arange(len(sizes)), sizes)) for c in range(col_tiles)]
    assert np.all(np.diff(group[:live]) >= 0)


@pytest.mark.parametrize("sizes", [[7, 2**30, 3], [10, 0, 0], [-4, 12, 9]])
def test_sizes_beyond_the_rows_are_cut_off(sizes):
    starts, ends = map(np.asarray, schedule.group_bounds(jnp.asarray(sizes, jnp.int32), 16))
    want = np.minimum(np.cumsum(np.clip(sizes, 0, None)), 16)
    np.testing.assert_array_equal(ends, want)
    np.testing.assert_array_equal(starts, [0, *want[:-1]])


@given(sizes=st.lists(st.integers(0, 9), min_size=8, max_size=8))
@settings(max_examples=40, deadline=None)
def test_group_schedule_sorts_longest_first(sizes):
    group, start, end = map(np.asarray, jax.jit(schedule.group_schedule, static_argnums=1)(jnp.asarray(sizes, jnp.int32), 100))
    np.testing.assert_array_equal(group, np.argsort(-np.asarray(sizes), kind="stable"))
    np.testing.assert_array_equal(end - start, np.asarray(sizes)[group])
    np.testing.assert_array_equal(end, np.cumsum(sizes)[group])


@pytest.mark.parametrize("operation", ["forward", "dlhs", "drhs"])
@pytest.mark.parametrize("rows,k,n,groups", [(262144, 1024, 1024, 64), (131072, 3584, 6144, 112), (65536, 2048, 1024, 256), (65536, 384, 640, 112),
                                             (8192, 320, 384, 896), (8, 64, 64, 1), (512, 192, 448, 3)])
def test_tiles_fit_the_multiprocessor(operation, rows, k, n, groups):
    for choice in tiles.candidates(operation, rows=rows, k=k, n=n, groups=groups):
        assert choice.shared_memory() + 1024 <= tiles.SHARED_MEMORY
        assert choice.cols % 64 == 0 and choice.warpgroup_rows % 64 == 0 and choice.warpgroup_cols % 64 == 0


def test_width_follows_the_result():
    assert [tiles.block_width(n) for n in (6144, 1024, 640, 384, 320, 192, 128, 64)] == [256, 256, 128, 192, 192, 192, 128, 64]


def test_a_table_entry_goes_before_the_rule(monkeypatch):
    entry = tiles.RowTiles(band=3)
    monkeypatch.setitem(tiles.TABLE, ("NVIDIA H200", "forward", 12, 1024, 1024), entry)
    shape = dict(rows=262144, k=1024, n=1024, groups=64)
    assert tiles.choose_tiles("NVIDIA H200", "forward", **shape) == entry
    assert tiles.choose_tiles("NVIDIA H200", "dlhs", **shape) != entry
    assert tiles.choose_tiles("NVIDIA H200", "forward", **shape | dict(rows=131072)) != entry


def test_steps_are_of_whole_masks():
    with pytest.raises(ValueError, match="depth: got 48, wanted a multiple of 32"):
        tiles.WeightTiles(depth=48)


def test_a_mask_that_a_load_would_wait_for_is_refused():
    with pytest.raises(ValueError, match="lag: got 3 with stages=4, wanted 1 to stages - 2 = 2"):
        tiles.WeightTiles(lag=3)


@pytest.mark.parametrize("change,reason", [
    (dict(rows=300), "M to be a positive multiple of 8, got 300; nearest: 304"), (dict(k=0), "K to be a positive multiple of 64, got 0; nearest: 64"),
    (dict(n=100), "N to be a positive multiple of 64, got 100; nearest: 128"), (dict(rhs_dtype="float32"), "got bfloat16 and float32; nearest: bfloat16"),
    (dict(out_dtype="float16"), "preferred_element_type to be lhs's dtype or float32, got float16; nearest: float32"),
    (dict(rows=2**30, n=2**20), "number of tiles to fit 32 bits"),
])
def test_unmet_requirements_name_the_nearest_value(change, reason):
    (unmet,) = specs.unmet_by_shape(**specs.EXAMPLE | change)
    assert reason in unmet


def test_what_is_met():
    assert specs.unmet_by_shape(**specs.EXAMPLE) == [] == specs.unmet_by_shape(**specs.EXAMPLE | dict(out_dtype="float32", groups=896, rows=8))
