"""Gated activations on Hopper: Pallas Mosaic GPU kernels that read and write everything once.

XLA's own gradient of the halves of one array writes three float32 arrays first, for what both halves need. A block brings some rows into shared memory, takes
them slab by slab through registers, and puts the results where the branches stood.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gated_activation.specs import LANES, VECTOR, Gate, block_rows
from pallas_kernels.gated_activation.xla import with_slopes

F32 = jnp.float32
# A thread reads and writes its own numbers alone: no barriers but those of the copies.
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


# Jitted, here and below, so that a model's many layers trace and lower each kernel once.
@functools.partial(jax.jit, static_argnames=("gate", "interpret"))
def forward(gate: Gate, branches: tuple[Array, ...], interpret: Any = None) -> Array:
    """interpret: `plgpu.InterpretGPUParams`, for tests; also below."""
    features = branches[0].shape[-1] * len(branches) // 2
    shape = (*branches[0].shape[:-1], features)
    return _call(gate, "gated_activation", branches, (), [(1, features)], interpret)[0].reshape(shape)


@functools.partial(jax.jit, static_argnames=("gate", "interpret"))
def backward(gate: Gate, branches: tuple[Array, ...], gradient: Array, interpret: Any = None) -> tuple[Array, ...]:
    """-> the gradient of each of branches."""
    found = _call(gate, "gated_activation_backward", branches, (gradient,), [(2 // len(branches), gradient.shape[-1])] * len(branches), interpret)
    return tuple(x.reshape(branch.shape) for x, branch in zip(found, branches))


def _call(gate: Gate, name: str, branches: tuple[Array, ...], gradients: tuple[Array, ...], results: list[tuple[int, int]],
          interpret: Any) -> tuple[Array, ...]:
    """results: (halves, features) of each. Arrays are [rows, halves, features / LANES, LANES] to the kernel: the copy engine takes 256 numbers an axis."""
    features, dtype = results[0][1], branches[0].dtype
    split = lambda x: x.reshape(-1, x.shape[-1] // features, features // LANES, LANES)
    inputs = [*map(split, branches), *map(split, gradients)]
    count, (block, slab) = inputs[0].shape[0], block_rows(features)
    held = plgpu.SMEM((block, features // LANES, LANES), dtype)
    scratch = [held] * (2 + len(gradients)) + [plgpu.Barrier(num_arrivals=2 + len(gradients))]
    kernel = plgpu.kernel(functools.partial(_body, gate, len(branches), len(gradients), slab),
                          out_type=tuple(jax.ShapeDtypeStruct((count, halves, features // LANES, LANES), dtype) for halves, _ in results),
                          scratch_types=scratch, grid=(count // block,), grid_names=("block",), compiler_params=PARAMS, kernel_name=name,
                          interpret=interpret or False)
    # Members of a vmap take turns: each fills the device by itself.
    return jax.custom_batching.sequential_vmap(lambda *arrays: kernel(*arrays))(*inputs)


def _body(gate: Gate, branches: int, gradients: int, slab: int, *refs: Any) -> None:
    inputs, rest = refs[:branches + gradients], refs[branches + gradients:]
    held, arrived = rest[-3 - gradients:-1], rest[-1]
    outputs = rest[:-3 - gradients]
    block = held[0].shape[0]
    rows = pl.ds(lax.axis_index("block") * block, block)
    # (array, half) of the gate, the linear branch and the result's gradient.
    places = [(0, 0), (branches - 1, 2 - branches), *((branches, 0),) * gradients]
    for (array, half), target in zip(places, held):
        plgpu.copy_gmem_to_smem(inputs[array].at[rows, half], target, arrived)
    plgpu.barrier_wait(arrived)
    layout = plgpu.Layout.WG_STRIDED((slab, *held[0].shape[1:]), vec_size=VECTOR)

    def step(i, _):
        part = pl.ds(i * slab, slab)
        a, b, *g = (plgpu.load(ref.at[part], layout=layout).astype(F32) for ref in held)
        y, by_gate, by_linear = with_slopes(gate, a, b)
        for ref, value in zip(held, (by_gate * g[0], by_linear * g[0]) if g else (y,)):
            ref.at[part][...] = value.astype(ref.dtype)
        return ()

    lax.fori_loop(0, block // slab, step, ())
    plgpu.commit_smem()
    for ref, (array, half) in zip(held, places[:2] if gradients else places[:1]):
        plgpu.copy_smem_to_gmem(ref, outputs[array].at[rows, half])
    plgpu.wait_smem_to_gmem(0)
