"""The parts of KDA's kernels that are written for threads, on emulated threads, against their form on values, which is what the interpreter runs."""
import jax.numpy as jnp
import numpy as np
import pytest
import thread_emulator
from thread_emulator import Shared

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda import mosaic_gpu_registers as registers
from pallas_kernels.kda import mosaic_gpu_warps as warps
from pallas_kernels.testing import rms_ratio

draw = np.random.default_rng(0)


@pytest.fixture
def machine(monkeypatch):
    return thread_emulator.patched(monkeypatch, registers, lanes, warps)


def normal(*shape):
    return np.float32(draw.normal(size=shape))


def log_decays():
    """Running sums inside tiles."""
    return np.cumsum(-np.abs(normal(4, 16, 64)), axis=1).reshape(64, 64)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def test_sums_inside_tiles(machine):
    x = normal(64, 64)
    assert rms_ratio(lanes.tile_sums(x, interpret=False), lanes.tile_sums(jnp.asarray(x), interpret=True)) < 1e-5


def test_suffix_sums(machine):
    x = normal(64, 64)
    got = lanes.suffix_sums(x, Shared(machine, np.full((4, 64), np.nan)), interpret=False)
    assert rms_ratio(got, lanes.suffix_sums(jnp.asarray(x), None, interpret=True)) < 1e-5


def test_sums_over_rows(machine):
    arrays = normal(64, 64), normal(64, 64)
    outs = tuple(Shared(machine, np.full(64, np.nan)) for _ in arrays)
    lanes.sum_rows(arrays, Shared(machine, np.full((8, 64), np.nan)), outs, interpret=False)
    for x, out in zip(arrays, outs):
        assert rms_ratio(out.array(), x.sum(0)) < 1e-6


def test_factors_of_tiles(machine):
    sums, table = log_decays(), Shared(machine, np.full((lanes.FACTORS, 64), np.nan))
    lanes.tile_factors(sums, Shared(machine, np.full((4, 64), np.nan)), table, interpret=False)
    want = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64)))
    assert rms_ratio(table.array(), want) < 1e-5
    for first in range(0, lanes.FACTORS - 1, 4):
        np.testing.assert_array_equal(lanes.of_tiles(table, first, interpret=False), np.repeat(table.array()[first:first + 4], 16, axis=0))


@pytest.mark.parametrize("kind", ["random", "all ones"])
def test_inverse(machine, kind):
    a = np.tril(draw.uniform(-0.3, 0.3, (64, 64)) if kind == "random" else np.ones((64, 64)), -1).astype(np.float32)
    blocks = warps.block_inverses(a, interpret=False)
    assert rms_ratio(blocks, warps.block_inverses(jnp.asarray(a), interpret=True)) < 1e-4
    high = rounded(blocks)
    got = warps.merge_blocks(blocks, *(Shared(machine, x, swizzled=True) for x in (high, blocks - high)), interpret=False)
    assert rms_ratio(got, np.linalg.inv(np.eye(64) + a.astype(np.float64))) < 1e-4
    assert rms_ratio(warps.merge_blocks(jnp.asarray(blocks), jnp.asarray(high), jnp.asarray(blocks - high), interpret=True), got) < 1e-4


def test_scores(machine):
    rows, writes, sums = normal(64, 64), rounded(normal(64, 64)), log_decays()
    table = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64))).astype(np.float32)
    got = warps.scores(rows, Shared(machine, writes, swizzled=True), Shared(machine, table), interpret=False)
    assert rms_ratio(got, warps.scores(*map(jnp.asarray, (rows, writes, table)), interpret=True)) < 1e-5


@pytest.mark.parametrize("strictly", [False, True])
def test_lower(machine, strictly):
    x = np.where(np.arange(64)[:, None] // 16 >= np.arange(64) // 16, normal(64, 64), 0)
    np.testing.assert_array_equal(warps.lower(x, strictly, interpret=False), np.tril(x, -strictly))
    np.testing.assert_array_equal(warps.lower(jnp.asarray(x), strictly, interpret=True), np.tril(x, -strictly))


def test_gradients_through_the_scores(machine):
    dp, da, reads, erasers, writes = (rounded(x) for x in (np.tril(normal(64, 64), -1), np.tril(normal(64, 64), -1), *normal(3, 64, 64)))
    sums, starts = log_decays(), tuple(normal(3, 64, 64))
    table = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64))).astype(np.float32)
    tiles = [Shared(machine, x, swizzled=True) for x in (dp, da, reads, erasers, writes)]
    got = warps.score_gradients(starts, *tiles, Shared(machine, table), interpret=False)
    want = warps.score_gradients(tuple(map(jnp.asarray, starts)), *map(jnp.asarray, (dp, da, reads, erasers, writes, table)), interpret=True)
    for g, w in zip(got, want):
        assert rms_ratio(g, w) < 1e-5


def test_reciprocal(machine):
    x = 1 + np.exp2(20 * normal(64, 64))
    np.testing.assert_allclose(lanes.reciprocal(x, interpret=False), 1 / x, rtol=1e-6)


def test_the_emulator_finds_races_and_half_warps(machine):
    """A warp that reads another's row without a barrier; a shuffle that some threads do not reach."""
    shared = Shared(machine, np.zeros((4, 64)))
    threads = np.arange(128)
    machine.write(shared.base + 4 * threads, np.zeros((128, 4), np.uint8), threads)
    with pytest.raises(AssertionError, match="read of what another warp wrote"):
        machine.read(shared.base + 4 * threads[::-1], 4, threads)
    with machine.only(threads < 4), pytest.raises(AssertionError, match="whole warps"):
        machine.whole_warps()
    with machine.only(threads < 64), pytest.raises(AssertionError, match="all threads"):
        machine.barrier()
