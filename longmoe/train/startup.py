"""What a run says of itself before its first step: versions, devices, mesh, kernels, memory, compilation."""
import dataclasses
import logging
from typing import Any

import jax

from longmoe.configs import TrainConfig
from longmoe.train.memory import training_memory
from longmoe.train.run_files import versions
from pallas_kernels.dispatch import available_kernels

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Startup:
    """What is known before compilation."""
    lines: list[str]
    """For the log and the console."""
    record: dict[str, Any]
    """For run.json, beside what is there already: estimated_bytes where the devices tell how much memory they have."""


def before_compiling(cfg: TrainConfig, mesh: jax.sharding.Mesh) -> Startup:
    """The report, and a warning where the step is not likely to fit. Compiling for a GPU takes minutes: what cannot work is said before."""
    devices = mesh.devices.flatten().tolist()
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1) or "one device"
    lines = [", ".join(f"{name} {version or 'from source'}" for name, version in versions().items()),
             f"{len(devices)} x {devices[0].device_kind} in {jax.process_count()} process{'es' * (jax.process_count() > 1)}; mesh: {axes}",
             "kernels: " + ", ".join(f"{operator} {name}" for operator, name in available_kernels().items()) + " (longmoe doctor says why)",
             f"data: {described_data(cfg)}"]
    limit = memory_limit(devices)
    if limit is None:
        return Startup(lines, {})
    sizes = {name: mesh.shape[name] for name in dataclasses.asdict(cfg.mesh)}
    memory = training_memory(dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **sizes)))
    parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in memory.parts.items())
    lines.append(f"memory of a device, estimated: {memory.peak / GIB:.2f} of {limit / GIB:.2f} GiB ({parts}; fullest in the {memory.fullest})")
    if memory.peak > limit:
        lines.append("this step is not likely to fit: lower data.batch_size or raise accumulation_steps, set model.remat full, lower data.sequence_length, "
                     "or split the parameters over more devices (mesh.fsdp)")
    return Startup(lines, dict(estimated_bytes=memory.peak))


def described_data(cfg: TrainConfig) -> str:
    """What a run with this config trains on, in words."""
    if cfg.data.task != "text":
        return f"generated, task {cfg.data.task}"
    named = cfg.data.path or ", ".join(source.label for source in cfg.data.sources)
    return named or "the source of Python's standard library, since neither data.path nor data.sources is given"


def after_compiling(compiled: jax.stages.Compiled, seconds: float) -> Startup:
    """What the compiled step takes: seconds it took to compile, bytes of its arguments (the train state and the batch) and of its temporaries."""
    found = compiled.memory_analysis()
    if found is None:
        return Startup([f"compiled in {seconds:.1f} s"], dict(compile_seconds=round(seconds, 1)))
    held, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    text = f"compiled in {seconds:.1f} s: the step holds {held / GIB:.3f} GiB of state and batch and {temporary / GIB:.3f} GiB of temporaries on each device"
    return Startup([text], dict(compile_seconds=round(seconds, 1), compiled_bytes=dict(arguments=held, temporary=temporary)))


def log(lines: list[str]) -> None:
    """Writes a report's lines to log.txt."""
    for line in lines:
        logging.getLogger("longmoe").info("%s", line)


def memory_limit(devices: list[Any]) -> int | None:
    """Bytes that this process may use of its fullest device; None where the backend does not tell (the CPU)."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    limits = [stats["bytes_limit"] for device in own if (stats := device.memory_stats()) and "bytes_limit" in stats]
    return min(limits) if limits else None
