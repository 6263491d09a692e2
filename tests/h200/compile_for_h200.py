"""Compiles a function for H200 GPUs on a machine that has none: what XLA then reports about memory and collectives is the real thing.

XLA's CUDA compiler lives in the plugin wheels and needs no driver, only a description of the device. It does not autotune or call
libraries without one, so the code is not what a GPU would run to the instruction: no figure of speed follows from it.
"""
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

# Public figures of the H200 SXM as CUDA's device properties name them; a message of XLA's GpuTargetConfigProto in text form.
_DEVICE = dict(
    core_count=132, fpus_per_core=128, threads_per_warp=32, threads_per_block_limit=1024, threads_per_core_limit=2048,
    registers_per_block_limit=65536, registers_per_core_limit=65536, shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_core=228 * 1024, block_dim_limit_x=2**31 - 1, block_dim_limit_y=65535, block_dim_limit_z=65535,
    memory_bandwidth=4_800_000_000_000, l2_cache_size=50 * 2**20, clock_rate_ghz=1.98, device_memory_size=141 * 2**30)
_TARGET = ("gpu_device_info { " + " ".join(f"{name}: {value}" for name, value in _DEVICE.items())
           + ' cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } } platform_name: "CUDA" '
           'dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 } device_description_str: "NVIDIA H200"')


def h200_devices(count: int = 1) -> list[Any]:
    """Described devices of one host: good for shardings and compilation, not for arrays. RuntimeError that says what is missing."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RuntimeError(f"compiling for an H200 needs jax-cuda13-plugin=={jax.__version__} and jax-cuda13-pjrt=={jax.__version__} on the "
                           "path, which this Python does not find: `make h200` fetches them into .h200/ and sets PYTHONPATH "
                           "(no GPU, driver or other CUDA wheel is needed)")
    if jax.config.jax_platforms != "cpu":
        raise RuntimeError(f"compiling for an H200 runs with JAX_PLATFORMS=cpu, got {jax.config.jax_platforms!r}: "
                           "otherwise JAX looks for a real GPU first")
    return list(topologies.get_topology_desc("h200", "cuda", target_config=_TARGET, topology=f"1x1x{count}").devices)


def compile_for_h200(f: Callable[..., Any], *specs: Any, donate_argnums: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """The executable of jit(f) for one H200. specs: a pytree of (shape, dtype) holders, such as jax.ShapeDtypeStruct, for each argument.

    `.memory_analysis().temp_size_in_bytes` is XLA's temporary memory, `.as_text()` the optimised program.
    """
    sharding = jax.sharding.SingleDeviceSharding(h200_devices()[0])
    return jax.jit(f, donate_argnums=donate_argnums).lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), specs)).compile()
