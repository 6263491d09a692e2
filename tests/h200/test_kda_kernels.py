"""KDA's kernels through ptxas for an H200: no register may spill in any configuration that `auto` can choose."""
import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200

from pallas_kernels.kda import mosaic_gpu_forward as kernels

pytestmark = pytest.mark.h200
S = jax.ShapeDtypeStruct


def inputs(heads, key, value, g_dtype=jnp.bfloat16, packed=False, bounded=True, tokens=256):
    wide = lambda width, dtype=jnp.bfloat16: S((1, tokens, heads, width), dtype)
    return kernels.Inputs(wide(key), wide(key), wide(value), wide(key, g_dtype), S((1, heads, tokens), jnp.float32),
                          S((heads,), jnp.float32) if bounded else None, S((heads, key), jnp.float32) if bounded else None,
                          S((1, tokens), jnp.int32) if packed else None, S((1, tokens // 64, 2), jnp.int32) if packed else None)


def assert_no_spills(function, arguments, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compile_for_h200(function, *arguments)
    report = "".join(capfd.readouterr())
    lines = [line for line in report.splitlines() if "spill stores" in line and "bytes stack frame" in line]
    print(*[line.strip() for line in report.splitlines() if "Used" in line], sep="\n")
    assert lines and all(" 0 bytes spill stores, 0 bytes spill loads" in line for line in lines), report


def states(heads, key, value):
    return S((1, heads, key, value), jnp.float32)


# Few heads: one warpgroup of columns in a block; many: all of them.
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("heads,key,value", [(2, 64, 64), (2, 128, 128), (2, 128, 64), (96, 64, 128), (96, 128, 128)])
def test_forward(heads, key, value, save, monkeypatch, capfd):
    config = kernels.Config(key ** -0.5, -5.0, True)
    assert_no_spills(lambda x, s: kernels.forward(config, x, s, save), (inputs(heads, key, value), states(heads, key, value)), monkeypatch, capfd)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("g_dtype,bounded", [(jnp.bfloat16, True), (jnp.float32, True), (jnp.float32, False)])
@pytest.mark.parametrize("key", [64, 128])
def test_preparation(key, g_dtype, bounded, packed, monkeypatch, capfd):
    config = kernels.Config(key ** -0.5, -5.0 if bounded else None, bounded)
    assert_no_spills(lambda x: kernels.prepare(config, x), (inputs(2, key, 64, g_dtype, packed, bounded),), monkeypatch, capfd)
