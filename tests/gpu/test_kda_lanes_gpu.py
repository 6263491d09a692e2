"""Each part of KDA's kernels that is written for threads, on a GPU, against its form on values (which is what the interpreter runs)."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_lanes as lanes
from pallas_kernels.kda import mosaic_gpu_warps as warps
from pallas_kernels.kda.mosaic_gpu_tiles import BF16, F32, PARAMS, WGMMA, split, tiled
from pallas_kernels.testing import rms_ratio

pytestmark = pytest.mark.gpu
SQUARE = jax.ShapeDtypeStruct((64, 64), F32)
draw = np.random.default_rng(0)


def normal(*shape):
    return np.float32(draw.normal(size=shape))


def triangular():
    return np.float32(np.tril(draw.uniform(-1, 1, (64, 64)), -1))


def run(body, *arguments, out=SQUARE, **scratch):
    """body(register arrays, scratch) -> a register array, run by one warpgroup on `arguments`."""
    names = tuple(scratch)

    def kernel(*refs):
        inputs, rest = refs[:len(arguments)], refs[len(arguments):]
        r = dict(zip(names, rest[1:]))
        rest[0][...] = body([plgpu.load(x, layout=WGMMA, optimized=False) for x in inputs], r)
    return np.asarray(jax.jit(plgpu.kernel(kernel, out_type=out, scratch_types=tuple(scratch.values()), num_threads=1, thread_name="wg",
                                           compiler_params=PARAMS))(*arguments))


def vector(*shape):
    return plgpu.SMEM(shape, F32)


def test_sums_inside_tiles():
    x = normal(64, 64)
    got = run(lambda x, r: lanes.tile_sums(x[0], interpret=False), x)
    assert rms_ratio(got, lanes.tile_sums(jnp.asarray(x), interpret=True)) < 1e-5


def test_reciprocal():
    x = 1 + np.exp2(20 * normal(64, 64))
    assert rms_ratio(run(lambda x, r: lanes.reciprocal(x[0], interpret=False), x), 1 / x.astype(np.float64)) < 1e-6


def test_suffix_sums():
    x = normal(64, 64)
    got = run(lambda x, r: lanes.suffix_sums(x[0], r["totals"], interpret=False), x, totals=vector(4, 64))
    assert rms_ratio(got, np.cumsum(x[::-1], axis=0)[::-1]) < 1e-5


@pytest.mark.parametrize("which", [0, 1])
def test_sums_over_rows(which):
    x, y = normal(64, 64), normal(64, 64)

    def body(arrays, r):
        lanes.sum_rows(tuple(arrays), r["totals"], (r["first"], r["second"]), interpret=False)
        sums = plgpu.load(r[("first", "second")[which]], layout=WGMMA.reduce(0), optimized=False)
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(sums, (64, 64), (1,)), WGMMA)
    got = run(body, x, y, totals=vector(8, 64), first=vector(64), second=vector(64))
    assert rms_ratio(got, np.broadcast_to((x, y)[which].sum(0), (64, 64))) < 1e-6


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_factors_of_tiles(first):
    sums = np.cumsum(-np.abs(normal(4, 16, 64)), axis=1).reshape(64, 64)

    def body(x, r):
        lanes.tile_factors(x[0], r["totals"], r["table"], interpret=False)
        return lanes.of_tiles(r["table"], first, interpret=False)
    got = run(body, sums, totals=vector(4, 64), table=vector(lanes.FACTORS, 64))
    table = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64)))
    assert rms_ratio(got, np.repeat(table[first:first + 4], 16, axis=0)) < 1e-5


@pytest.mark.parametrize("kind", ["random", "all ones"])
def test_inverse(kind):
    a = triangular() * np.float32(0.3) if kind == "random" else np.tril(np.ones((64, 64), np.float32), -1)

    def body(x, r):
        blocks = warps.block_inverses(x[0], interpret=False)
        r["high"][...], r["low"][...] = split(blocks)
        plgpu.commit_smem()
        return warps.merge_blocks(blocks, r["high"], r["low"], interpret=False)
    got = run(body, a, high=tiled(64, 64), low=tiled(64, 64))
    assert rms_ratio(got, np.linalg.inv(np.eye(64) + a.astype(np.float64))) < 1e-4


def test_scores():
    rows, writes = normal(64, 64), np.asarray(jnp.asarray(normal(64, 64), BF16), np.float32)
    sums = np.cumsum(-np.abs(normal(4, 16, 64)), axis=1).reshape(64, 64)

    def body(x, r):
        r["writes"][...] = x[1].astype(BF16)
        plgpu.commit_smem()
        lanes.tile_factors(x[2], r["totals"], r["table"], interpret=False)
        return warps.lower(warps.scores(x[0], r["writes"], r["table"], interpret=False), True, interpret=False)
    got = run(body, rows, writes, sums, totals=vector(4, 64), table=vector(lanes.FACTORS, 64), writes=tiled(64, 64))
    table = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64))).astype(np.float32)
    assert rms_ratio(got, np.tril(warps.scores(*map(jnp.asarray, (rows, writes, table)), interpret=True), -1)) < 1e-5


def test_gradients_through_the_scores():
    dp, da = triangular(), triangular()
    others = [normal(64, 64) for _ in range(6)]
    sums = np.cumsum(-np.abs(normal(4, 16, 64)), axis=1).reshape(64, 64)
    names = ("dp", "da", "reads", "erasers", "writes")
    rounded = lambda x: np.asarray(jnp.asarray(x, BF16), np.float32)

    def kernel(which):
        def body(x, r):
            for name, value in zip(names, x[:5]):
                r[name][...] = value.astype(BF16)
            plgpu.commit_smem()
            lanes.tile_factors(x[8], r["totals"], r["table"], interpret=False)
            return warps.score_gradients(tuple(x[5:8]), *(r[name] for name in names), r["table"], interpret=False)[which]
        return run(body, dp, da, *others, sums, totals=vector(4, 64), table=vector(lanes.FACTORS, 64), **{name: tiled(64, 64) for name in names})
    table = np.stack(lanes._factor_rows(list(sums[15::16]), np.exp2, np.zeros(64)))
    want = warps._score_gradients_of_values(tuple(others[3:]), *(rounded(x) for x in (dp, da, *others[:3])), table)
    for which in range(3):
        assert rms_ratio(kernel(which), want[which]) < 1e-5
