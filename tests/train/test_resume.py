"""`fit` resumed: to the bit on mixed and packed text, read ahead, in micro-batches; after signals, kills and torn files; and what it refuses."""
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from mixed_run import STEPS, data_state, make_sources, mixed_config

import longmoe
from longmoe.cli import main
from longmoe.configs import CheckpointConfig
from longmoe.train import loop, run_files
from longmoe.train.metrics import CLOCK, read_lines
from longmoe.train.signals import StopSignals


def config(sources, optimizer="muon", **changes):
    cfg = dataclasses.replace(mixed_config(sources, optimizer), checkpoint=CheckpointConfig(every=5, keep=1, keep_every=10))
    return dataclasses.replace(cfg, **changes)


@pytest.fixture(autouse=True, scope="module")
def one_device_and_one_trace():
    """A step is traced once for all runs of its config: tracing is most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:1]
        patch.setattr(loop, "make_mesh", lambda mesh_config: longmoe.make_mesh(mesh_config, devices))
        patch.setattr(loop, "make_train_step", cache(loop.make_train_step))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("sources"))


def uninterrupted(text, tmp_path_factory, optimizer):
    return longmoe.fit(config(text, optimizer), tmp_path_factory.mktemp("run") / "whole")


@pytest.fixture(scope="module")
def muon(text, tmp_path_factory):
    return uninterrupted(text, tmp_path_factory, "muon")


@pytest.fixture(scope="module")
def adamw(text, tmp_path_factory):
    return uninterrupted(text, tmp_path_factory, "adamw")


def plain(state):
    return jax.tree.map(np.asarray, state.replace(rng=jax.random.key_data(state.rng)))


def lines(paths):
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in read_lines(paths.metrics)]


def assert_same_run(a, b):
    """Parameters, optimizer, router state, random key, data's position and every step's metrics, to the bit."""
    def same(path, x, y):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(same, plain(a.state), plain(b.state))
    assert data_state(Path(a.paths.root), STEPS) == data_state(Path(b.paths.root), STEPS)
    assert lines(a.paths) == lines(b.paths) and [line["step"] for line in lines(a.paths)] == list(range(1, STEPS + 1))


def copied(run, tmp_path, name="run"):
    return Path(shutil.copytree(run.paths.root, tmp_path / name))


def steps_of(folder):
    return sorted(int(path.name) for path in (Path(folder) / "checkpoints").iterdir())


@pytest.fixture
def kill_at(monkeypatch):
    """kill_at(step, *signals): the signals come while that step runs, in later calls of fit."""
    # A shell's background job inherits an ignored SIGINT, which a run leaves ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    recorder = loop._Recorder.record

    def at(step, *numbers):
        def record(self, pending, progress):
            if step is not None and pending.step == step - 1:
                for number in numbers:
                    os.kill(os.getpid(), number)
            recorder(self, pending, progress)

        monkeypatch.setattr(loop._Recorder, "record", record)
    yield at
    signal.signal(signal.SIGINT, inherited)


def test_ignored_signals_are_named(kill_at):
    with StopSignals() as signals:
        assert signals.ignored == []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals:
        assert signals.ignored == ["SIGINT"]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.exhaustive)])
def test_ten_steps_and_ten_in_fresh_objects_are_twenty_to_the_bit(optimizer, request, text, tmp_path, kill_at):
    whole, run, cfg = request.getfixturevalue(optimizer), tmp_path / "run", config(text, optimizer)
    assert cfg.data.prefetch == 4 and cfg.accumulation_steps == 4
    kill_at(10, signal.SIGTERM)
    with pytest.raises(longmoe.Stopped):
        longmoe.fit(cfg, run)
    assert steps_of(run) == [10] and [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, 11))
    packer = data_state(run, 10)["packer"]
    # Tokens that the steps were given, not those that were read ahead; all three sources among them, and documents that are cut.
    assert sum(source["tokens"] for source in packer["sources"].values()) == 10 * 8 * 24
    assert all(source["tokens"] > 0 for source in packer["sources"].values()) and any(lane and lane[2] > 0 for lane in packer["lanes"])
    kill_at(None)
    assert_same_run(longmoe.fit(cfg, run), whole)
    assert_same_run(longmoe.fit(cfg, run), whole)   # a run that has ended is given back as it is


def test_resume_from_an_older_step(muon, text, tmp_path, caplog):
    """The later checkpoint and the later lines go, after a sentence; the call without it ends where the run had ended."""
    run = copied(muon, tmp_path)
    assert steps_of(run) == [10, 20]
    with caplog.at_level(logging.INFO, "longmoe"):
        short = longmoe.fit(config(text, steps=10), run, resume_from=10)
    assert int(short.state.step) == 10 and steps_of(run) == [10] and [line["step"] for line in lines(short.paths)] == list(range(1, 11))
    assert "dropping the checkpoints of steps [20] and the metrics of later steps" in caplog.text
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(plain(short.state)), jax.tree.leaves(plain(muon.state))))
    assert_same_run(longmoe.fit(config(text), run), muon)


def test_signals_save_and_the_same_call_resumes(muon, text, tmp_path, kill_at):
    """SIGTERM in step 7, SIGINT in step 13, SIGINT twice in step 15: two saved steps and one interruption, and no bit is lost."""
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    kill_at(7, signal.SIGTERM)
    with pytest.raises(longmoe.Stopped) as stopped:
        longmoe.fit(config(text), run)
    assert stopped.value.code == 0 and stopped.value.received == signal.SIGTERM and isinstance(stopped.value, SystemExit)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert steps_of(run) == [7] and "SIGTERM: saved step 7 of 20" in (run / "log.txt").read_text()
    kill_at(13, signal.SIGINT)
    with pytest.raises(longmoe.Stopped):
        longmoe.fit(config(text), run)
    assert steps_of(run) == [10, 13]
    kill_at(15, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        longmoe.fit(config(text), run)
    assert steps_of(run) == [10, 13]
    kill_at(None)
    assert_same_run(longmoe.fit(config(text), run), muon)
    assert steps_of(run) == [10, 20]


def test_another_thread_leaves_signals_alone(muon, text, tmp_path):
    """Python has handlers in the main thread only; the log says what that means."""
    run, handlers = copied(muon, tmp_path), []
    read = loop.make_loader

    def looking(*arguments, **keywords):
        handlers.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))
        return read(*arguments, **keywords)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_loader", looking)
        thread = threading.Thread(target=longmoe.fit, args=(config(text), run))
        thread.start()
        thread.join()
    assert handlers == [before]
    assert "not in the main thread: SIGTERM and SIGINT will not save" in (run / "log.txt").read_text()


def test_refusals_come_before_anything_is_dropped(muon, text, tmp_path):
    run = copied(muon, tmp_path)
    with pytest.raises(ValueError, match="resume_from: got 5, wanted a complete checkpoint of .*: steps 10, 20"):
        longmoe.fit(config(text), run, resume_from=5)
    with pytest.raises(ValueError, match="resume_from: got 10 with fresh=True, wanted one of the two"):
        longmoe.fit(config(text), run, resume_from=10, fresh=True)
    with pytest.raises(ValueError, match="state: source 'code' was saved with fingerprint"):
        longmoe.fit(config(make_sources(tmp_path / "other", seed=1)), run, resume_from=10)
    with pytest.raises(ValueError, match="state: it was saved with seed=0, this loader has seed=1"):
        longmoe.fit(config(text, seed=1), run, resume_from=10)
    with pytest.raises(ValueError, match="another config .optim.optimizer: saved 'muon', now 'adamw'"):
        longmoe.fit(config(text, "adamw"), run, resume_from=10)
    assert steps_of(run) == [10, 20] and len(lines(muon.paths)) == STEPS


def test_a_damaged_newest_step_is_refused_and_an_older_one_named(muon, text, tmp_path):
    run = copied(muon, tmp_path)
    victim = max((run / "checkpoints" / "20").rglob("d/*"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"20: this checkpoint is damaged: .*{victim.name} has .* --resume-from \(steps 10\), or start over with --fresh"):
        longmoe.fit(config(text), run)
    assert_same_run(longmoe.fit(config(text), run, resume_from=10), muon)


def test_a_second_process_is_refused(tmp_path):
    holder = ("import sys; from etils import epath; from longmoe.train.run_files import only_writer\n"
              "with only_writer(epath.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()")
    process = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="run_dir: got .* where another process is training"):
            longmoe.fit(config(Path("nowhere")), tmp_path, fresh=True)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ValueError, match="path: got 'nowhere/code', which is no folder"):
        longmoe.fit(config(Path("nowhere")), tmp_path)


@pytest.mark.parametrize("local", [True, False])
def test_metrics_after_a_kill_have_each_step_once(muon, text, tmp_path, monkeypatch, local):
    """Killed at step 13 inside a line, the last complete checkpoint being that of step 10. Where files cannot grow they are copied: each checkpoint finds its
    own lines there."""
    run = copied(muon, tmp_path)
    shutil.rmtree(run / "checkpoints" / "20")
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(whole[:12]) + whole[12][:40])
    if not local:
        monkeypatch.setattr(run_files, "is_local", lambda path: str(run) not in str(path))
        monkeypatch.setattr(loop, "is_local", run_files.is_local)
        save, there = loop.Checkpoints.save, []
        monkeypatch.setattr(loop.Checkpoints, "save", lambda *arguments: (there.append(len(read_lines(run / "metrics.jsonl"))), save(*arguments)))
    again = longmoe.fit(config(text), run)
    assert_same_run(again, muon)
    log = (run / "log.txt").read_text()
    assert ("cannot be appended to: metrics.jsonl and log.txt grow in" in log) == (not local) and "resumed at step 10" in log
    assert local or there == [15, 20]


def test_the_command_line(muon, text, tmp_path, capsys, monkeypatch):
    run = copied(muon, tmp_path)
    monkeypatch.setitem(longmoe.cli.PRESETS, "nano", lambda: config(text))
    command = ["train", "nano", "--run-dir", str(run)]
    assert main([*command, "--resume-from", "15"]) == 2
    assert "resume_from: got 15" in capsys.readouterr().err
    assert main([*command, "--resume-from", "20"]) == 0
    assert json.loads((run / "run.json").read_text())["config"]["steps"] == STEPS
    monkeypatch.setattr(longmoe.cli, "fit", lambda *_, **__: (_ for _ in ()).throw(OSError("6: the checkpoint could not be written")))
    assert main(command) == 1 and "longmoe train: 6: the checkpoint could not be written" in capsys.readouterr().err


def test_a_forked_worker_leaves_sigint_to_the_run_and_ends_by_sigterm():
    """A data worker inherits the handlers; Ctrl-C reaches it together with the run, which still needs its batches."""
    script = ("import os, signal, time\nfrom longmoe.train.signals import StopSignals\n"
              "with StopSignals() as signals:\n"
              "    worker = os.fork()\n"
              "    if not worker: time.sleep(60); os._exit(0)\n"
              "    os.kill(worker, signal.SIGINT); time.sleep(0.3); alive = os.waitpid(worker, os.WNOHANG) == (0, 0)\n"
              "    os.kill(worker, signal.SIGTERM)\n"
              "    print(alive, os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), signals.received)")
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "True 143 None\n"
