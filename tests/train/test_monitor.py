"""What watches a run: alerts that are limited in rate and never stop training, the index of runs, optional sinks, throughput. No model is compiled here."""
import dataclasses
import http.server
import json
import logging
import sys
import threading
import time
import types

import numpy as np
import pytest
from tiny_config import tiny_train

import longmoe
from longmoe.configs import AlertConfig, LogConfig
from longmoe.train import throughput
from longmoe.train.alerts import Alerts
from longmoe.train.monitor import Monitor
from longmoe.train.run_index import MARK, last_line, write_run_index
from longmoe.train.sinks import TensorBoardSink, WandbSink, by_name
from longmoe.train.throughput import Throughput

GOOD = {"skipped": 0, "loss": 2.0, "max_violation": np.array([0.1, 0.4])}
BAD = GOOD | {"skipped": 1, "loss": np.nan}
COLLECT = "import os, sys, uuid; open(os.path.join({folder!r}, uuid.uuid4().hex + '.json'), 'w').write(sys.stdin.read())"


@pytest.fixture
def command(tmp_path):
    """(AlertConfig of a command that writes each alert into a file, function that reads them in the order of their steps)."""
    folder = tmp_path / "alerts"
    folder.mkdir()
    (tmp_path / "collect.py").write_text(COLLECT.format(folder=str(folder)))
    read = lambda: sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda alert: alert["step"])
    return AlertConfig(command=f"{sys.executable} -S {tmp_path / 'collect.py'}", timeout_seconds=60.0), read


def test_a_skipped_step_is_told_once_in_a_while(command):
    config, read = command
    with Alerts(dataclasses.replace(config, every_seconds=0.5), "mine") as alerts:
        for step in (1, 2, 3):
            alerts.check(step, BAD)
        alerts.check(4, GOOD)
        time.sleep(0.6)
        alerts.check(5, BAD)
    first, second = read()
    assert first["kind"] == "skipped" and first["step"] == 1 and first["suppressed"] == 0 and first["run"] == "mine" and "step 1 was skipped" in first["text"]
    assert second["step"] == 5 and second["suppressed"] == 2


def test_kinds_have_limits_of_their_own(command):
    config, read = command
    with Alerts(dataclasses.replace(config, max_violation=0.3), "mine") as alerts:
        alerts.check(7, BAD)
    assert sorted(alert["kind"] for alert in read()) == ["max_violation", "skipped"]
    assert any("MaxVio 0.40 in MoE layer 1 at step 7 is above 0.3" in alert["text"] for alert in read())


def test_what_is_off_is_not_told(command):
    config, read = command
    with Alerts(dataclasses.replace(config, on_skipped=False, max_violation=0.5), "mine") as alerts:
        alerts.check(1, BAD)
        alerts.check(2, GOOD | {"max_violation": np.zeros(0)})
    assert read() == []


def test_the_watchdog_tells_of_a_stall_and_only_after_the_start(command):
    config, read = command
    with Alerts(dataclasses.replace(config, stall_seconds=0.4), "mine") as alerts:
        time.sleep(0.8)                                                 # compiling
        alerts.start()
        for step in range(1, 5):
            time.sleep(0.1)
            alerts.check(step, GOOD)
        time.sleep(1.2)
    (stall,) = read()
    assert stall["kind"] == "stall" and stall["step"] == 4 and "the last was step 4" in stall["text"]


def test_a_run_that_dies_is_told_and_an_interrupted_one_is_not(command):
    config, read = command
    for error in (RuntimeError("five in a row"), KeyboardInterrupt()):
        with pytest.raises(type(error)), Alerts(config, "mine") as alerts:
            alerts.check(3, GOOD)
            raise error
    (stopped,) = read()
    assert stopped["kind"] == "stopped" and "RuntimeError: five in a row" in stopped["text"] and stopped["step"] == 3


@pytest.mark.parametrize("broken,said", [
    (AlertConfig(command="/no/such/program"), "the command failed"), (AlertConfig(command=f"{sys.executable} -S -c 'raise SystemExit(3)'"), "exit status 3"),
    (AlertConfig(command="unclosed 'quote"), "the command failed"), (AlertConfig(webhook="http://127.0.0.1:9/"), "the webhook failed")])
def test_an_alert_that_fails_is_logged(broken, said, caplog):
    with caplog.at_level(logging.WARNING, logger="longmoe"), Alerts(broken, "mine") as alerts:
        alerts.check(1, BAD)
    assert said in caplog.text and "step 1 was skipped" in caplog.text


def test_the_webhook_gets_the_alert_as_json():
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Alerts(AlertConfig(webhook=f"http://127.0.0.1:{server.server_port}/"), "mine") as alerts:
            alerts.check(2, BAD)
        server.shutdown()
    ((kind, alert),) = bodies
    assert kind == "application/json" and set(alert) == {"run", "kind", "step", "text", "time", "suppressed"} and alert["kind"] == "skipped"


def test_refuses_alerts_that_make_no_sense():
    with pytest.raises(ValueError, match="webhook: got 'ftp://x'"):
        AlertConfig(webhook="ftp://x")
    with pytest.raises(ValueError, match="stall_seconds: got 0"):
        AlertConfig(stall_seconds=0)


def make_run(folder, name, loss=2.5, **record):
    run = folder / name
    run.mkdir()
    config = {"steps": 100, "model": {"num_layers": 5, "width": 128, "moe": {"num_experts": 16}}}
    (run / "run.json").write_text(json.dumps({"config": config, "device": "cpu", "commit": "abcdef0123"} | record))
    lines = [{"step": step, "loss": loss, "tokens_per_second": 1234.5, "max_violation": [0.5, 0.25], "skipped": 0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')


def test_the_index_has_one_line_a_run(tmp_path):
    make_run(tmp_path, "first")
    make_run(tmp_path, "a<b>", loss="nan", commit=None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "corpus").mkdir()
    text = write_run_index(tmp_path).read_text()
    assert text.startswith(MARK) and text.count("<tr>") == 3 and "broken" not in text and "corpus" not in text
    assert "a&lt;b&gt;" in text and "<b>" not in text and "<td>nan</td>" in text
    assert "<td>2 / 100</td><td>2.5000</td><td>1,234</td><td>0.50</td><td>0</td><td>cpu</td><td>abcdef0</td>" in text
    assert '<a href="first/">first</a>' in text
    (tmp_path / "first" / "report.html").touch()
    (tmp_path / "first" / "metrics.jsonl").unlink()
    assert "<td>0 / 100</td>" in (text := write_run_index(tmp_path).read_text()) and '<a href="first/report.html">first</a>' in text
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["index.html"]


def test_the_index_leaves_other_pages_alone(tmp_path, caplog):
    page = tmp_path / "index.html"
    page.write_text("<h1>mine</h1>")
    assert write_run_index(tmp_path) is None
    with caplog.at_level(logging.WARNING, logger="longmoe"), Monitor(tiny_train(), tmp_path / "run", [], 0):
        pass
    assert page.read_text() == "<h1>mine</h1>" and "is not an index of runs" in caplog.text


def test_the_last_line_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "expert_load": [0] * 3000}) + "\n" for step in range(30)))
    assert last_line(path)["step"] == 29 and last_line(tmp_path / "none") == {}


def test_the_monitor_writes_logged_steps_to_sinks_and_the_index(tmp_path, monkeypatch):
    written = []
    sink = types.SimpleNamespace(write=lambda step, figures: written.append((step, figures)), close=lambda: written.append("closed"))
    monkeypatch.setattr("longmoe.train.monitor.open_sinks", lambda cfg, run_dir, step: [sink])
    make_run(tmp_path, "run")
    with Monitor(tiny_train(), tmp_path / "run", [], 0) as monitor:
        monitor.start()
        figures = monitor.measure(100)
        assert figures["tokens_per_second"] == pytest.approx(100 / figures["step_seconds"]) and "mfu" not in figures and monitor.memory() == {}
        monitor.observe(1, GOOD | {"expert_load": np.zeros((2, 4))}, logged=False)
        monitor.observe(2, GOOD | {"expert_load": np.zeros((2, 4))}, logged=True)
    assert written == [(2, {"skipped": 0.0, "loss": 2.0, "max_violation/0": 0.1, "max_violation/1": 0.4}), "closed"]
    assert (tmp_path / "index.html").exists()
    cfg = dataclasses.replace(tiny_train(), log=LogConfig(run_index=False))
    (tmp_path / "index.html").unlink()
    with Monitor(cfg, tmp_path / "run", [], 0):
        assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("log,package", [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb_project="mine"), "wandb")])
def test_a_missing_package_is_named_with_its_extra(log, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"LogConfig.{package}.*longmoe\[log\]"):
        Monitor(dataclasses.replace(tiny_train(), log=log), tmp_path, [], 0).__enter__()


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    """Against a stand-in with the three calls that are used."""
    calls = []
    run = types.SimpleNamespace(log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **keywords: calls.append(keywords) or run))
    cfg = dataclasses.replace(tiny_train(), log=LogConfig(wandb_project="mine"))
    for step in (0, 5, 0):
        sink = WandbSink(cfg, tmp_path, step)
    sink.write(1, by_name({"loss": np.float32(1.5)}))
    sink.close()
    first, second, third = calls[:3]
    assert first["project"] == "mine" and first["id"] == second["id"] != third["id"] and first["config"]["model"]["width"] == 32
    assert calls[3:] == [(1, {"loss": 1.5}), "finish"]


def test_tensorboard_events(tmp_path, monkeypatch):
    """Against a stand-in for the three modules that are used."""
    events = []
    record = lambda name: lambda **fields: types.SimpleNamespace(kind=name, **fields)
    session, summary = record("session"), record("summary")
    session.START, summary.Value = 1, record("value")
    modules = {"tensorboard.compat.proto.event_pb2": dict(Event=record("event"), SessionLog=session),
               "tensorboard.compat.proto.summary_pb2": dict(Summary=summary),
               "tensorboard.summary.writer.event_file_writer": dict(EventFileWriter=lambda folder: types.SimpleNamespace(
                   add_event=events.append, close=lambda: events.append(folder)))}
    monkeypatch.setattr("longmoe.train.sinks.importlib.import_module", lambda name: types.SimpleNamespace(**modules[name]))
    sink = TensorBoardSink(tmp_path / "tensorboard", step=4)
    sink.write(5, {"loss": 1.5, "max_violation/0": 0.2})
    sink.close()
    start, step, closed = events
    assert start.step == 5 and start.session_log.status == 1 and closed == str(tmp_path / "tensorboard")
    assert step.step == 5 and [(value.tag, value.simple_value) for value in step.summary.value] == [("loss", 1.5), ("max_violation/0", 0.2)]


def device(kind, stats=None):
    return types.SimpleNamespace(device_kind=kind, process_index=0, memory_stats=lambda: stats)


def test_utilisation_is_three_forward_passes_over_the_peak(monkeypatch):
    cfg = longmoe.presets.small()
    clock = iter([100.0, 101.0, 103.0])
    monkeypatch.setattr(throughput, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    meter = Throughput(cfg, [device("NVIDIA H200"), device("NVIDIA H100 80GB HBM3")])
    meter.start()
    figures = meter.step(50_000)
    assert figures["step_seconds"] == 2.0 and figures["tokens_per_second"] == 25_000 and figures["elapsed_seconds"] == 2.0
    assert figures["mfu"] == pytest.approx(25_000 * 3 * longmoe.estimate(cfg).flops_per_token / (2 * 989.4e12))


def test_no_utilisation_where_the_peak_is_not_known():
    cfg = longmoe.presets.small()
    wide = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype="float32"))
    assert "mfu" not in Throughput(cfg, [device("NVIDIA H200"), device("cpu")]).step(1)
    assert "mfu" not in Throughput(wide, [device("NVIDIA H200")]).step(1)


def test_memory_is_the_fullest_devices():
    stats = [{"bytes_in_use": 3, "peak_bytes_in_use": 9}, {"bytes_in_use": 5, "peak_bytes_in_use": 7}]
    cfg = tiny_train()
    assert Throughput(cfg, [device("gpu", s) for s in stats]).memory() == {"device_bytes_in_use": 5, "device_peak_bytes": 9}
    assert Throughput(cfg, [device("cpu")]).memory() == {}
