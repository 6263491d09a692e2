"""The command line: longmoe train PRESET | eval RUN | generate RUN | report RUN ... | estimate PRESET | doctor | data build OUT | data inspect
| import-hf PATH | export-hf PATH.

    longmoe data build data/mine --text path/to/files
    longmoe train nano --run-dir runs/first --data.path data/mine --steps 1000
    longmoe train nano --run-dir runs/mix --data.sources mix.json --data.sources.0.weight 2.0
    longmoe eval runs/first
    longmoe generate runs/first --prompt 'def main('
    longmoe report runs/first runs/mix
    longmoe estimate kimi_k3 --data.sequence-length 65536
    longmoe doctor
    longmoe import-hf path/to/checkpoint --out models/mine
    longmoe export-hf runs/first --out path/to/export

Every field of TrainConfig is a flag under its dotted path; `longmoe train nano --help` lists them with their present values.
`longmoe data --help` says more of the data commands.
"""
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from etils import epath
from rich.console import Console
from rich.table import Table

import pallas_kernels
from longmoe import commands as of_runs
from longmoe.configs import ModelConfig, TrainConfig, to_json
from longmoe.data import command as data_command
from longmoe.inference.planner import estimate
from longmoe.interop.commands import export_hf, import_hf
from longmoe.interop.folders import load_model
from longmoe.model.lm import LongMoE
from longmoe.parallel.rules import path_name, spec_of
from longmoe.presets import PRESETS
from longmoe.train.checkpoints import load_checkpoint
from longmoe.train.loop import fit
from longmoe.train.optim import optimizer_labels
from longmoe.train.run_files import PACKAGES, RunPaths, installed_version


@dataclasses.dataclass(frozen=True)
class Train(TrainConfig):
    """Trains a preset; the same command again resumes."""
    run_dir: str = ""
    """Folder of the run: run.json, metrics.jsonl, log.txt, checkpoints/."""
    fresh: bool = False
    """Deletes what earlier runs wrote into the folder and starts over."""
    resume_from: int | None = None
    """Goes on from this kept step instead of the newest, and drops the checkpoints and metrics of later steps. Every time: leave it out to resume."""
    dry_run: bool = False
    """Prints the config, the mesh, one line a parameter, costs and kernels, and stops. Needs no run_dir and allocates nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 for arguments that make no sense, 1 for a file that cannot be read or written."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "help"
    commands = {"train": _train, "eval": of_runs.evaluate, "generate": of_runs.generate, "report": of_runs.report, "estimate": _estimate,
                "doctor": _doctor, "data": data_command.main, "import-hf": import_hf, "export-hf": _export_hf}
    if command not in commands:
        asked = command in ("help", "-h", "--help")
        print(__doc__ if asked else f"longmoe: no command {command!r}, wanted one of {', '.join(commands)}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        commands[command](arguments)
    except ValueError as error:
        print(f"longmoe {command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"longmoe {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _preset(command: str, arguments: list[str]) -> TrainConfig:
    name = arguments.pop(0) if arguments else ""
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, wanted one of {', '.join(PRESETS)}, as in `longmoe {command} nano`")
    cfg = PRESETS[name]()
    sources = data_command.take_sources(arguments, "--data.sources")
    return cfg if sources is None else dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=sources))


def _fields(cfg: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(TrainConfig)}


def _train(arguments: list[str]) -> None:
    parsed = tyro.cli(Train, default=Train(**_fields(_preset("train", arguments))), args=arguments, prog="longmoe train PRESET")
    if parsed.dry_run:
        return _dry_run(TrainConfig(**_fields(parsed)))
    if not parsed.run_dir:
        raise ValueError("run_dir: got nothing, wanted a folder for the run, as in --run-dir runs/first")
    fit(TrainConfig(**_fields(parsed)), parsed.run_dir, fresh=parsed.fresh, resume_from=parsed.resume_from)


def _dry_run(cfg: TrainConfig) -> None:
    """What a run of this config would be; nothing is allocated, so a config for more devices than this machine has is listed too."""
    print(to_json(cfg))
    variables = jax.eval_shape(LongMoE(cfg.model).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    labels = jax.tree.leaves(optimizer_labels(cfg.optim, variables["params"]))
    print(f"\n{'parameter':64s} {'shape':28s} {'dtype':10s} {'optimizer':10s} sharding")
    for (path, leaf), label in zip(leaves, labels, strict=True):
        name = path_name(path)
        print(f"{name:64s} {str(list(leaf.shape)):28s} {leaf.dtype!s:10s} {label:10s} {tuple(spec_of(name))}")
    print(f"\nmesh: {dataclasses.asdict(cfg.mesh)} on {len(jax.devices())} devices, {jax.devices()[0].device_kind}")
    _print_costs(cfg)
    print(f"\n{pallas_kernels.kernel_report()}")


def _estimate(arguments: list[str]) -> None:
    _print_costs(tyro.cli(TrainConfig, default=_preset("estimate", arguments), args=arguments, prog="longmoe estimate PRESET"))


def _print_costs(cfg: TrainConfig) -> None:
    found = estimate(cfg)
    table = Table("figure", "value")
    rows = [("parameters", f"{found.total_params:,}"), ("active a token", f"{found.active_params:,}"),
            (f"forward FLOPs a token at {cfg.data.sequence_length:,}", f"{found.flops_per_token:.3e}"),
            ("training bytes a device", f"{found.bytes_per_device:,}"), ("cache bytes a token", f"{found.kv_bytes_per_token:,}"),
            ("state bytes a sequence", f"{found.state_bytes_per_sequence:,}")]
    for name, value in (*rows, *((f"  in {part}", f"{count:,}") for part, count in found.params_by_part.items())):
        table.add_row(name, value)
    Console().print(table)


def _export_hf(arguments: list[str]) -> None:
    """A run directory is exported from its newest checkpoint, any other folder as `import-hf` wrote it."""
    def load(path: str) -> tuple[ModelConfig, Any]:
        if not RunPaths(epath.Path(path)).checkpoints.exists():
            return load_model(path)
        config, variables = load_checkpoint(path)
        return config.model, variables

    export_hf(arguments, load)


def _doctor(arguments: list[str]) -> None:
    if arguments:
        raise ValueError(f"doctor: got {' '.join(arguments)!r}, wanted no arguments")
    for package in PACKAGES:
        print(f"{package:20s}{installed_version(package) or 'from source'}")
    print(f"devices: {[device.device_kind for device in jax.devices()]}\n\n{pallas_kernels.kernel_report()}")


if __name__ == "__main__":
    raise SystemExit(main())
