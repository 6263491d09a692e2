"""Commands that train nothing: longmoe estimate PRESET | doctor | bench OPERATOR, and `train --dry-run`."""
import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

import pallas_kernels
from longmoe import bench_moe
from longmoe.configs import TrainConfig, to_json
from longmoe.inference.serving_costs import Serving, ServingConfig
from longmoe.model.lm import LongMoE
from longmoe.parallel.rules import path_name, spec_of
from longmoe.planner import Estimate, estimate
from longmoe.train.memory import TrainingMemory
from longmoe.train.optim import optimizer_labels
from longmoe.train.run_files import PACKAGES, installed_version
from longmoe.train.startup import described_data
from pallas_kernels.bench import attention_gpu, beside, grouped_matmul, kda_cpu, kda_gpu
from pallas_kernels.dispatch import unmet_on_hopper


@dataclasses.dataclass(frozen=True)
class EstimateCommand(TrainConfig):
    """What a preset costs, on paper: parameters, FLOPs, training memory on one device of the mesh, serving memory and its bandwidth floor."""
    serving: ServingConfig = ServingConfig()
    platform: Literal["gpu", "cpu"] = "gpu"
    """Kind of device that training memory is meant for."""


def print_estimate(preset: TrainConfig, arguments: list[str]) -> None:
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(TrainConfig)}
    parsed = tyro.cli(EstimateCommand, default=EstimateCommand(**fields), args=arguments, prog="longmoe estimate PRESET")
    cfg = TrainConfig(**{name: getattr(parsed, name) for name in fields})
    found, console = estimate(cfg, platform=parsed.platform), Console()
    for table in (parameters_table(found, cfg.data.sequence_length), memory_table(found.training, parsed.platform),
                  *serving_tables(found.serving(parsed.serving))):
        console.print(table)


def parameters_table(found: Estimate, length: int) -> Table:
    table = Table("figure", "value", title="Parameters and FLOPs")
    rows = [("parameters", f"{found.total_params:,}"), *((f"  {part}", f"{count:,}") for part, count in found.params_by_part.items()),
            ("active a token", f"{found.active_params:,}"), (f"forward FLOPs a token at {length:,}", f"{found.flops_per_token:.3e}"),
            (f"cache bytes a token, {found.model.dtype}", f"{found.kv_bytes_per_token:,}"), ("state bytes a sequence", f"{found.state_bytes_per_sequence:,}")]
    for row in rows:
        table.add_row(*row)
    return table


def memory_table(memory: TrainingMemory, platform: str) -> Table:
    table = Table("part", "bytes", "GiB", title=f"Training memory of one {platform} device, at its fullest: the {memory.fullest}")
    rows = [*((f"  {name.replace('_', ' ')}", size) for name, size in memory.parts.items()), ("training bytes a device", memory.peak),
            *((f"the {name} alone needs" if name != memory.fullest else f"the {name} needs", size) for name, size in memory.phases.items()),
            *((f"kept by a layer of {name}", size) for name, size in memory.saved_by_layer.items())]
    for name, size in rows:
        table.add_row(name, f"{size:,}", f"{size / 2**30:.3f}")
    return table


def serving_tables(found: Serving) -> tuple[Table, Table]:
    """Weights and state, then one row a context length."""
    on = found.config
    fixed = Table("figure", "value", title=f"Serving on {on.devices} devices of {on.memory / 1e9:,.0f} GB: experts {on.weights}, "
                                           f"cache {on.cache}, state {on.state}")
    for row in [("routed experts", _size(found.expert_bytes)), ("other weights", _size(found.other_bytes)),
                (f"cache bytes a token, {on.cache}", f"{found.latent_bytes_per_token:,}"),
                ("state a sequence", f"{_size(found.state_bytes)} and convolutions {_size(found.conv_bytes)}"),
                ("a snapshot of the state is as large as", f"{found.snapshot_tokens:,.0f} tokens of cache"),
                ("FLOPs a token in the weights", f"{found.weight_flops:.3e}")]:
        fixed.add_row(*row)
    lengths = Table("context", "cache", "sequence", "sequences that fit", "FLOPs of the next token", "FLOPs to read it all",
                    f"least ms a step, batch {on.batch}", title="By context length", padding=(0, 0))
    for row in found.rows:
        lengths.add_row(f"{row.length:,}", _size(row.latent_bytes), _size(row.sequence_bytes), f"{row.sequences:,}",
                        f"{row.decode_flops:.2e}", f"{row.prefill_flops:.2e}", f"{row.floor_ms:,.3g}")
    return fixed, lengths


def _size(count: float) -> str:
    """Bytes in the largest unit that they fill."""
    unit, scale = next(((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if count >= scale), ("B", 1))
    return f"{count / scale:,.2f} {unit}" if scale > 1 else f"{count:,.0f} B"


def dry_run(cfg: TrainConfig) -> None:
    """What a run of this config would be; nothing is allocated, so a config for more devices than this machine has is listed too."""
    print(to_json(cfg))
    variables = jax.eval_shape(LongMoE(cfg.model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    labels = jax.tree.leaves(optimizer_labels(cfg.optim, variables["params"]))
    print(f"\n{'parameter':64s} {'shape':28s} {'dtype':10s} {'optimizer':10s} sharding")
    for (path, leaf), label in zip(leaves, labels, strict=True):
        name = path_name(path)
        print(f"{name:64s} {str(list(leaf.shape)):28s} {leaf.dtype!s:10s} {label:10s} {tuple(spec_of(name))}")
    print(f"\nmesh: {dataclasses.asdict(cfg.mesh)} (-1: all devices that are left) on {len(jax.devices())} devices, {jax.devices()[0].device_kind}")
    print(f"data: {described_data(cfg)}")
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    found, console = estimate(cfg, platform=platform), Console()
    console.print(parameters_table(found, cfg.data.sequence_length))
    console.print(memory_table(found.training, platform))
    print(f"\n{pallas_kernels.kernel_report()}")


def doctor(arguments: list[str]) -> None:
    if arguments:
        raise ValueError(f"doctor: got {' '.join(arguments)!r}, wanted no arguments")
    for package in PACKAGES:
        print(f"{package:20s}{installed_version(package) or 'from source'}")
    print(f"devices: {[device.device_kind for device in jax.devices()]}\n\n{pallas_kernels.kernel_report()}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: the known name that `name` is likely to mean."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


BENCHES = ("kda", "attention", "grouped-matmul", "moe", "short-conv", "gated-activation", "top-k")


def bench(arguments: list[str]) -> None:
    """longmoe bench OPERATOR [flags]: times an operator on this machine and writes JSON; `longmoe bench OPERATOR --help` lists its flags."""
    operator = arguments.pop(0) if arguments else ""
    if operator not in BENCHES:
        raise ValueError(f"operator: got {operator!r}, wanted one of {', '.join(BENCHES)}, as in `longmoe bench kda`{nearest(operator, BENCHES)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")     # read when JAX first looks for devices, which is now
    hopper = not unmet_on_hopper()
    asks = bool({"-h", "--help"} & set(arguments))
    if operator in ("attention", "grouped-matmul") and not hopper and not asks:
        raise ValueError(f"operator: got {operator} on {jax.devices()[0].device_kind}, wanted a Hopper GPU: this benchmark times Mosaic GPU kernels")
    runs = {"attention": attention_gpu.main, "grouped-matmul": grouped_matmul.main, "moe": bench_moe.main, "kda": kda_gpu.main if hopper else kda_cpu.main,
            "short-conv": beside.short_conv_main, "gated-activation": beside.gated_activation_main, "top-k": beside.top_k_main}
    runs[operator](arguments)
