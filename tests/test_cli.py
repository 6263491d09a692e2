"""The command line's answers to good and bad arguments."""
import pytest

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
