"""KDA's kernels through ptxas for an H200, in every configuration that `auto` can choose: no register spills, but for a bounded few in two of the kernels."""
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200

from pallas_kernels.kda import mosaic_gpu_backward, mosaic_gpu_decode, mosaic_gpu_tiles
from pallas_kernels.kda import mosaic_gpu_forward as kernels
from pallas_kernels.kda.mosaic_gpu_prepare import prepare

pytestmark = pytest.mark.h200
S = jax.ShapeDtypeStruct
# Bytes a thread by channels of the keys, with chunks for several turns of the kernels' loops. The aim is 0 here too.
PREPARE_SPILLS = {64: 0, 128: 170}
GRADIENTS_SPILLS = {64: 760, 128: 390}


def inputs(heads, key, value, g_dtype=jnp.bfloat16, packed=False, bounded=True, tokens=1024):
    wide = lambda width, dtype=jnp.bfloat16: S((1, tokens, heads, width), dtype)
    return mosaic_gpu_tiles.Inputs(wide(key), wide(key), wide(value), wide(key, g_dtype), S((1, heads, tokens), jnp.float32),
                          S((heads,), jnp.float32) if bounded else None, S((heads, key), jnp.float32) if bounded else None,
                          S((1, tokens), jnp.int32) if packed else None, S((1, tokens // 64, 2), jnp.int32) if packed else None)


def spilled(function, arguments, monkeypatch, capfd):
    """Bytes of spill stores of each kernel in the compiled function, in order."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compile_for_h200(function, *arguments)
    report = "".join(capfd.readouterr())
    print(*[line.strip() for line in report.splitlines() if "Used" in line], sep="\n")
    return [int(n) for n in re.findall(r"stack frame, (\d+) bytes spill stores", report)]


def states(heads, key, value):
    return S((1, heads, key, value), jnp.float32)


EXHAUSTIVE = lambda *values: pytest.param(*values, marks=pytest.mark.exhaustive)


# Few heads: one warpgroup of columns in a block; many: all of them.
@pytest.mark.parametrize("save", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("heads,key,value", [(2, 64, 64), EXHAUSTIVE(2, 128, 128), EXHAUSTIVE(2, 128, 64), EXHAUSTIVE(96, 64, 128), (96, 128, 128)])
def test_forward(heads, key, value, save, monkeypatch, capfd):
    config = mosaic_gpu_tiles.Config(key ** -0.5, -5.0, True)
    function = lambda x, s: kernels.forward(config, x, s, save)
    prepared, recur = spilled(function, (inputs(heads, key, value), states(heads, key, value)), monkeypatch, capfd)
    assert prepared <= PREPARE_SPILLS[key] and recur == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("g_dtype,bounded", [(jnp.bfloat16, True), EXHAUSTIVE(jnp.float32, True), EXHAUSTIVE(jnp.float32, False)])
@pytest.mark.parametrize("key", [64, 128])
def test_preparation(key, g_dtype, bounded, packed, monkeypatch, capfd):
    config = mosaic_gpu_tiles.Config(key ** -0.5, -5.0 if bounded else None, bounded)
    found, = spilled(lambda x: prepare(config, x), (inputs(96, key, 64, g_dtype, packed, bounded),), monkeypatch, capfd)
    assert found <= PREPARE_SPILLS[key]


def test_parts_of_a_sequence(monkeypatch, capfd):
    config, x = mosaic_gpu_tiles.Config(128 ** -0.5, -5.0, True), inputs(2, 128, 128, tokens=64 * 64)
    prepared, transitions, recur = spilled(lambda x, s: kernels.forward(config, x, s, True), (x, states(2, 128, 128)), monkeypatch, capfd)
    assert prepared <= PREPARE_SPILLS[128] and transitions == recur == 0


@pytest.mark.parametrize("heads,key,value", [(64, 64, 64), EXHAUSTIVE(64, 128, 64), EXHAUSTIVE(64, 128, 128), EXHAUSTIVE(96, 64, 128), (96, 128, 128)])
def test_backward(heads, key, value, monkeypatch, capfd):
    config = mosaic_gpu_tiles.Config(key ** -0.5, -5.0, True)
    x, chunks = inputs(heads, key, value), 16
    o = S(x.v.shape, jnp.bfloat16)
    kept = kernels.Kept(S((1, heads, chunks, key, value), jnp.bfloat16), o, None, None)
    prepared, reverse, gradients = spilled(lambda *a: mosaic_gpu_backward.backward(config, *a), (x, kept, o, states(heads, key, value)), monkeypatch, capfd)
    assert prepared <= PREPARE_SPILLS[key] and reverse == 0
    assert gradients <= GRADIENTS_SPILLS[key]


@pytest.mark.parametrize("key,value", [(128, 128), (64, 64)])
def test_step_works_in_place(key, value, monkeypatch, capfd):
    wide = lambda width: S((4, 2, width), jnp.bfloat16)
    call = mosaic_gpu_decode.Call("bounded", -5.0, True, True, key ** -0.5)
    x = (wide(key), wide(key), wide(value), wide(key), S((4, 2), jnp.bfloat16), S((4, 2, key, value), jnp.float32),
         S((2,), jnp.float32), S((2, key), jnp.float32))
    function = lambda *x: mosaic_gpu_decode.step(call, *x)
    assert spilled(function, x, monkeypatch, capfd) == [0]
    assert compile_for_h200(function, *x, donate_argnums=(5,)).memory_analysis().alias_size_in_bytes == 4 * 2 * key * value * 4
