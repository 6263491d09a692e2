"""The Mosaic GPU grouped matmul through NVIDIA's assembler: what ships spills no register, and memory beside operands and results is small."""
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200, h200_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import mosaic_gpu, tiles
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import rows_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weights_matmul

pytestmark = pytest.mark.h200
SHAPES = [(262144, 1024, 1024, 64), (131072, 3584, 6144, 112), (65536, 2048, 1024, 256), (524288, 3584, 6144, 896), (65536, 384, 640, 112),
          (8192, 320, 384, 256), (8, 64, 64, 3)]
LAUNCH_REGISTERS = 168
"""65,536 registers over three warpgroups of 128 threads, in steps of 8; compute warpgroups then take registers over from the memory warpgroup."""


def specs(rows, k, n, groups, dtype=jnp.bfloat16):
    shapes = ((rows, k), dtype), ((groups, k, n), dtype), ((groups,), jnp.int32), ((rows, n), dtype)
    return [jax.ShapeDtypeStruct(*x) for x in shapes]


def gradients(out_dtype, lhs, rhs, sizes, dout):
    out, vjp = jax.vjp(lambda lhs, rhs: mosaic_gpu.grouped_matmul(lhs, rhs, sizes, out_dtype), lhs, rhs)
    return out, *vjp(dout.astype(out.dtype))


def assembled(capfd, monkeypatch, function, *arguments):
    """The executable, and (registers, bytes spilled) of each of its kernels."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    compiled = compile_for_h200(function, *arguments)
    text = "".join(capfd.readouterr())
    # C7510 and its kin say that the assembler ran the tensor cores' work one after another.
    assert "C7510" not in text and "serialized" not in text, text
    return compiled, list(zip(map(int, re.findall(r"Used (\d+) registers", text)), map(int, re.findall(r"(\d+) bytes spill stores", text))))


# A float32 result differs in the epilogue only: two shapes are enough.
@pytest.mark.parametrize("shape,out_dtype", [*((shape, "bfloat16") for shape in SHAPES), *((shape, "float32") for shape in SHAPES[::4])])
def test_what_ships_spills_nothing(capfd, monkeypatch, shape, out_dtype):
    compiled, kernels = assembled(capfd, monkeypatch, functools.partial(gradients, out_dtype), *specs(*shape))
    assert kernels == [(LAUNCH_REGISTERS, 0)] * 3
    rows, k, n, groups = shape
    memory = compiled.memory_analysis().temp_size_in_bytes
    # A float32 incoming gradient is rounded to 16 bits first.
    assert memory < 0.01 * 2 * (rows * k + groups * k * n + rows * n) + 2**20 + (2 * rows * n if out_dtype == "float32" else 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation,choice", [
    (operation, choice) for operation in ("forward", "dlhs", "drhs") for choice in tiles.candidates(operation, rows=131072, k=3584, n=6144, groups=112)])
def test_tuning_candidates_spill_nothing(capfd, monkeypatch, operation, choice):
    lhs, rhs, sizes, dout = specs(131072, 3584, 6144, 112)
    if operation == "drhs":
        function, arguments = functools.partial(weights_matmul, out_dtype="bfloat16", tiles=choice, sms=132), (lhs, dout, sizes)
    else:
        function = functools.partial(rows_matmul, out_dtype="bfloat16", tiles=choice, transpose_rhs=operation == "dlhs", sms=132)
        arguments = (dout if operation == "dlhs" else lhs, rhs, sizes)
    assert assembled(capfd, monkeypatch, function, *arguments)[1] == [(LAUNCH_REGISTERS, 0)]


def test_float16_and_vmap(capfd, monkeypatch):
    batched = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in specs(512, 128, 256, 8, jnp.float16)]
    _, kernels = assembled(capfd, monkeypatch, jax.vmap(functools.partial(gradients, "float16")), *batched)
    assert kernels == [(LAUNCH_REGISTERS, 0)] * 3


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
def test_shard_map(replicated, check_vma):
    """On 4 devices, with the weights of each device's own groups or the same on all: no collective but the sum of a replicated weight's gradient."""
    mesh = jax.sharding.Mesh(h200_devices(4), ("expert",), axis_types=(AxisType.Auto,))
    weight = P() if replicated else P("expert")
    sharded = jax.shard_map(functools.partial(gradients, "bfloat16"), mesh=mesh, in_specs=(P("expert"), weight, P("expert"), P("expert")),
                            out_specs=(P("expert"), P("expert"), weight if check_vma else P("expert")), check_vma=check_vma)
    lhs, rhs, sizes, dout = specs(2048, 128, 256, 32)
    rhs = jax.ShapeDtypeStruct((8, 128, 256), rhs.dtype) if replicated else rhs
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
                 for x, spec in zip((lhs, rhs, sizes, dout), (P("expert"), weight, P("expert"), P("expert")))]
    text = jax.jit(sharded).lower(*arguments).compile().as_text()
    assert ("all-reduce" in text) == (replicated and check_vma)
    assert not re.search("all-gather|all-to-all|collective-permute", text)
