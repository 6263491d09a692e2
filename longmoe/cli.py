"""The command line: longmoe train PRESET | eval RUN | generate RUN | report RUN ... | estimate PRESET | doctor | bench OPERATOR | data build OUT
| data long OUT | data inspect | import-hf PATH | export-hf PATH.

    longmoe data build data/mine --text path/to/files
    longmoe data long planted.jsonl --text path/to/files --tokenizer data/mine
    longmoe train nano --run-dir runs/first --data.path data/mine --steps 1000
    longmoe train nano --run-dir runs/mix --data.sources mix.json --data.sources.0.weight 2.0
    longmoe train small --run-dir runs/long --stages stages.json
    longmoe eval runs/first
    longmoe eval runs/first --suite needle,ruler --lengths 1024 8192
    longmoe generate runs/first --prompt 'def main('
    longmoe report runs/first runs/mix
    longmoe estimate kimi_k3 --data.sequence-length 65536
    longmoe doctor
    longmoe bench kda --out kda.json
    longmoe import-hf path/to/checkpoint --out models/mine
    longmoe export-hf runs/first --out path/to/export

Every field of TrainConfig is a flag under its dotted path; `longmoe train nano --help` lists them with their present values.
`longmoe data --help` says more of the data commands.
"""
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from etils import epath

from longmoe import commands as of_runs
from longmoe import plan_commands as planning
from longmoe.configs import ModelConfig, StageConfig, TrainConfig, from_json
from longmoe.data import command as data_command
from longmoe.interop.commands import export_hf, import_hf
from longmoe.interop.folders import load_model
from longmoe.presets import PRESETS
from longmoe.stage_gates import measure_gate
from longmoe.train.checkpoints import load_checkpoint
from longmoe.train.loop import fit
from longmoe.train.run_files import RunPaths, installed_version


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
    """Runs one command; returns the exit status: 0, 2 for arguments that make no sense, 1 for a file that cannot be read or written, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "help"
    if command in ("--version", "-V"):
        print(f"longmoe {installed_version('longmoe') or 'from source'}")
        return 0
    commands = {"train": _train, "eval": of_runs.evaluate, "generate": of_runs.generate, "report": of_runs.report,
                "estimate": _estimate, "doctor": planning.doctor, "bench": planning.bench, "data": data_command.main,
                "import-hf": import_hf, "export-hf": _export_hf}
    if command not in commands:
        asked = command in ("help", "-h", "--help")
        mistake = f"longmoe: no command {command!r}, wanted one of {', '.join(commands)}{planning.nearest(command, commands)}"
        print(__doc__ if asked else mistake, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        commands[command](arguments)
    except ValueError as error:
        print(f"longmoe {command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"longmoe {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"longmoe {command}: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, AssertionError) as error:
        # JAX says it in words for a backend that does not start, and by a bare assertion for one that this installation does not have.
        no_backend = not str(error) and "JAX_PLATFORMS" in os.environ if isinstance(error, AssertionError) else str(error).startswith(
            "Unable to initialize backend")
        if not no_backend:
            raise
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        print(f"longmoe {command}: JAX_PLATFORMS: got {os.environ.get('JAX_PLATFORMS', '')!r}, which JAX cannot use here{reason}. "
              "Unset it to run on what this machine has, or install JAX for its GPU: pip install 'longmoe[gpu]'", file=sys.stderr)
        return 2
    return 0


def _preset(command: str, arguments: list[str]) -> TrainConfig:
    name = arguments.pop(0) if arguments else ""
    if name in ("-h", "--help"):
        print(f"longmoe {command} PRESET [flags]; presets: {', '.join(PRESETS)}. `longmoe {command} nano --help` lists the flags with their values.")
        raise SystemExit(0)
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}, wanted one of {', '.join(PRESETS)}, as in `longmoe {command} nano`"
                         f"{planning.nearest(name, PRESETS)}")
    cfg = PRESETS[name]()
    file = data_command.take_file(arguments, "--data.sources", "sources")
    return cfg if file is None else dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=data_command.read_sources(file)))


def _with_stages(cfg: TrainConfig, file: str | None) -> TrainConfig:
    """The config with the stages that a JSON file lists, which also say how many steps there are."""
    if file is None:
        return cfg
    listed = json.dumps({"stages": data_command.read_list(file, "stages")})
    return cfg.with_stages(from_json(Listed, listed).stages)


@dataclasses.dataclass(frozen=True)
class Listed:
    """What a file of stages holds."""
    stages: tuple[StageConfig, ...]


def _fields(cfg: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(TrainConfig)}


def _train(arguments: list[str]) -> None:
    stages = data_command.take_file(arguments, "--stages", "stages")
    parsed = tyro.cli(Train, default=Train(**_fields(_preset("train", arguments))), args=arguments, prog="longmoe train PRESET")
    cfg = _with_stages(TrainConfig(**_fields(parsed)), stages)
    if parsed.dry_run:
        return planning.dry_run(cfg)
    if not parsed.run_dir:
        raise ValueError("run_dir: got nothing, wanted a folder for the run, as in --run-dir runs/first")
    fit(cfg, parsed.run_dir, fresh=parsed.fresh, resume_from=parsed.resume_from, measure=measure_gate)


def _estimate(arguments: list[str]) -> None:
    planning.print_estimate(_preset("estimate", arguments), arguments)


def _export_hf(arguments: list[str]) -> None:
    """A run directory is exported from its newest checkpoint, any other folder as `import-hf` wrote it."""
    def load(path: str) -> tuple[ModelConfig, Any]:
        if not RunPaths(epath.Path(path)).checkpoints.exists():
            return load_model(path)
        config, variables = load_checkpoint(path)
        return config.model, variables

    export_hf(arguments, load)


if __name__ == "__main__":
    raise SystemExit(main())
