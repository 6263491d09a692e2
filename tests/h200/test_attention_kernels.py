"""Attention's kernels through ptxas for an H200: no register spills at narrow widths, few at the widest, and memory in proportion to the rows."""
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200

from pallas_kernels.attention import vjp

pytestmark = pytest.mark.h200
S = jax.ShapeDtypeStruct
SPILLS = {(64, 64): 0, (96, 64): 0, (128, 128): 80, (192, 128): 700}
"""Bytes a thread that each kernel may spill. The aim is 0 everywhere."""


def arguments(tokens, key, value, heads=8):
    wide = lambda width: S((1, tokens, heads, width), jnp.bfloat16)
    return wide(key), wide(key), wide(value), S((1, tokens), jnp.int32), S((), jnp.int32)


def run(q, k, v, first, start):
    o, pull = jax.vjp(lambda q, k, v: vjp.attention(q, k, v, first, start, scale=0.1)[0], q, k, v)
    return o, pull(o)


@pytest.mark.parametrize("widths", SPILLS)
def test_spills(widths, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compile_for_h200(run, *arguments(1024, *widths))
    spilled = [int(n) for n in re.findall(r"stack frame, (\d+) bytes spill stores", "".join(capfd.readouterr()))]
    assert len(spilled) == 3 and max(spilled) <= SPILLS[widths]


def test_memory_is_linear():
    temporary = [compile_for_h200(run, *arguments(tokens, 96, 64)).memory_analysis().temp_size_in_bytes for tokens in (16384, 32768)]
    assert temporary[1] < 2.1 * temporary[0]
    # A gradient beside o and its own, log_sum, largest and delta: nothing with tokens twice.
    assert temporary[1] < 32768 * 8 * (4 * 96 * 2 + 4 * 64 * 2)
