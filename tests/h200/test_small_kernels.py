"""The kernels of the short convolution, the gated activations and top-k through NVIDIA's assembler: no register spills, no memory that is not named here."""
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200

from pallas_kernels.gated_activation import vjp as gated_activation
from pallas_kernels.gated_activation.specs import Gate
from pallas_kernels.short_conv import vjp
from pallas_kernels.top_k import mosaic_gpu as top_k

pytestmark = pytest.mark.h200
S = jax.ShapeDtypeStruct


def assembled(capfd, monkeypatch, function, *arguments):
    """The executable, and the bytes that each of its kernels spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compiled = compile_for_h200(function, *arguments)
    return compiled, list(map(int, re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))))


def with_gradients(x, taps, runs):
    out, pull = jax.vjp(lambda x, taps: vjp.short_conv(x, taps, runs), x, taps)
    return out, pull(out)


@pytest.mark.parametrize("channels,width,dtype", [(1024, 4, "bfloat16"), (768, 4, "float16"), (384, 2, "bfloat16"), (128, 9, "bfloat16")])
def test_short_conv(channels, width, dtype, monkeypatch, capfd):
    rows = S((2, 8192, channels), dtype), S((width, channels), jnp.float32), S((2, 8192), jnp.int32)
    compiled, spilled = assembled(capfd, monkeypatch, with_gradients, *rows)
    assert spilled == [0, 0]
    # The taps' gradient of each tile of 64 tokens, float32.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 2 * 8192 // 64 * width * channels * 4 + 2**20


@pytest.mark.parametrize("columns,k", [(64, 9), (112, 9), (896, 17), (1024, 32), (8, 8)])
def test_top_k(columns, k, monkeypatch, capfd):
    compiled, spilled = assembled(capfd, monkeypatch, lambda x: top_k.top_k_ids(x, k), S((8192, columns), jnp.float32))
    assert spilled == [0]
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * (k + 8) * 4 + 2**20


@pytest.mark.parametrize("features,halves", [(320, True), (512, True), (896, True), (3584, False), (64, False), (8192, False)])
@pytest.mark.parametrize("kind", ["situ", "swiglu"])
def test_gated_activation(features, halves, kind, monkeypatch, capfd):
    branches = (S((65536, 2 * features), jnp.bfloat16),) if halves else (S((65536, features), jnp.bfloat16),) * 2

    def with_gradients(branches):
        out, pull = jax.vjp(lambda branches: gated_activation.gated_activation(Gate(kind), branches), branches)
        return out, pull(out)

    compiled, spilled = assembled(capfd, monkeypatch, with_gradients, branches)
    assert spilled == [0, 0]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
