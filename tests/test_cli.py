"""The command line's answers to good and bad arguments."""
import json
import os
import subprocess
import sys

import jax
import pytest

import longmoe
from longmoe.cli import main


def test_estimate_and_doctor(capsys):
    assert main(["estimate", "nano", "--model.moe.num-experts", "8"]) == 0
    assert "active a token" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "grouped_matmul" in capsys.readouterr().out
    assert main(["--help"]) == 0 and "longmoe train" in capsys.readouterr().out


def test_dry_run_lists_every_parameter_once_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nano", "--dry-run", "--optim.optimizer", "adamw"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith(("embedding ", "lm_head ", "layer"))]
    assert len(lines) == len({line.split()[0] for line in lines}) > 40
    assert all(" adamw " in line for line in lines) and "training bytes a device" in out and "grouped_matmul" in out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arguments,message", [
    (["trian"], "wanted one of train, eval, generate"), (["train", "nan"], "wanted one of nano, small"), (["train"], "preset: got ''"),
    (["train", "nano"], "run_dir: got nothing"), (["doctor", "--all"], "wanted no arguments")])
def test_mistakes_are_said(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_flag_gets_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "nano", "--run-dir", "x", "--stepz", "3"])
    assert stop.value.code == 2 and "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("arguments,hint", [
    (["trian"], "did you mean train?"), (["estimate", "kimi_k2"], "did you mean kimi_k3?"), (["bench", "grouped_matmul"], "did you mean grouped-matmul?")])
def test_the_nearest_name_is_offered(capsys, arguments, hint):
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


def test_a_kernel_that_needs_a_gpu_is_refused_with_its_reason(capsys):
    assert main(["train", "nano", "--dry-run", "--model.implementation", "mosaic_gpu"]) == 2
    assert "wanted a Hopper GPU" in capsys.readouterr().err
    assert main(["bench", "grouped-matmul"]) == 2
    assert "wanted a Hopper GPU" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_platform_that_is_not_there_is_said(platform):
    """In a process of its own: JAX looks for its devices once."""
    found = subprocess.run([sys.executable, "-m", "longmoe", "doctor"], env={**os.environ, "JAX_PLATFORMS": platform}, capture_output=True, text=True)
    assert found.returncode == 2 and f"JAX_PLATFORMS: got '{platform}'" in found.stderr and "Traceback" not in found.stderr


def test_jax_of_another_version_is_said():
    with pytest.raises(ImportError, match=r"does not run on jax 0\.10\.1, wanted jax >= 0\.11\.2 and < 0\.13: pip install"):
        longmoe.check_jax("0.10.1")
    with pytest.warns(UserWarning, match="never tried on jax 0.13.0"):
        longmoe.check_jax("0.13.0.dev20270101")
    longmoe.check_jax("0.11.2"), longmoe.check_jax("0.12.3")


def test_a_second_process_on_a_run_directory_is_refused(capsys, tmp_path):
    holder = ("import sys; from etils import epath; from longmoe.train.run_files import only_writer\n"
              "with only_writer(epath.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert main(["train", "nano", "--run-dir", str(tmp_path)]) == 2
        other.stdin.close()
    assert "where another process is training; wait for it, end it, or use another folder" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_bench_kda_writes_times_with_their_errors(capsys, tmp_path):
    out = tmp_path / "kda.json"
    assert main(["bench", "kda", "--shapes", "test", "--repeats", "2", "--no-accuracy", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"].startswith("longmoe bench kda --shapes test") and found["jax"] == jax.__version__
    portable = [row for row in found["speed"] if row["implementation"] == "xla"]
    assert len(portable) == 4 and any(row["implementation"] == "reference" for row in found["speed"])
    for row in portable:
        assert row["forward"]["median_ms"] > 0 and row["forward_backward"]["min_ms"] > 0
        assert 0 < row["rms"]["o"] < 1e-6 and 0 < row["rms"]["worst_gradient"] < 2e-6


def test_bench_of_the_small_operators(tmp_path):
    for operator, shape, found in (("short-conv", "1,64,8,3", "train_ms"), ("gated-activation", "8,4", "train_ms"), ("top-k", "8,16,3", "ms")):
        out = tmp_path / f"{operator}.json"
        assert main(["bench", operator, "--shapes", shape, "--repeats", "1", "--out", str(out)]) == 0
        row, = json.loads(out.read_text())["rows"]
        assert row["implementation"] == "xla" and row[found] > 0 and row.get("equal", True) and max(row.get("rms", [0])) < 1e-6


@pytest.mark.exhaustive
def test_bench_moe_times_the_layer_and_its_parts(capsys, tmp_path):
    out = tmp_path / "moe.json"
    assert main(["bench", "moe", "--layers", "cpu", "--repeats", "1", "--rival", "jax.lax:ragged_dot", "--out", str(out)]) == 0
    row, = json.loads(out.read_text())["rows"]
    assert all(row[name] > 0 for name in ("layer_ms", "grouped_ms", "dense_ms", "router_ms", "rival_layer_ms")) and row["rms"] < 1e-6
    assert main(["bench", "moe", "--layers", "cpu", "--rival", "ragged_dot"]) == 2
    assert "wanted MODULE:FUNCTION" in capsys.readouterr().err
