"""The report before the first step, on devices that tell how much memory they have."""
import dataclasses
import io
import logging

import jax
import pytest
from tiny_config import tiny_train

import longmoe
from longmoe.train import startup
from longmoe.train.memory import training_memory
from longmoe.train.metrics import open_log


@pytest.fixture
def mesh():
    return longmoe.make_mesh(tiny_train().mesh, jax.devices()[:1])


@pytest.mark.parametrize("share,fits", [(0.9, False), (1.1, True)])
def test_a_step_that_does_not_fit_is_said_before_compiling(mesh, monkeypatch, share, fits):
    cfg = dataclasses.replace(tiny_train(), mesh=dataclasses.replace(tiny_train().mesh, fsdp=1))
    peak = training_memory(cfg).peak
    monkeypatch.setattr(startup, "memory_limit", lambda devices: int(share * peak))
    report = startup.before_compiling(cfg, mesh)
    assert report.record == {"estimated_bytes": peak}
    assert any("memory of a device, estimated" in line for line in report.lines)
    assert any("is not likely to fit: lower data.batch_size" in line for line in report.lines) is not fits


def test_a_cpu_makes_no_promise(mesh):
    report = startup.before_compiling(tiny_train(), mesh)
    assert report.record == {} and not any("estimated" in line for line in report.lines)
    assert f"jax {jax.__version__}" in report.lines[0] and "1 x cpu" in report.lines[1]


def test_a_plain_handler_on_the_root_prints_no_line_twice(tmp_path):
    """absl hangs one there; the root's own level decides what of ours it prints."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.root.addHandler(handler)
    level = logging.root.level
    try:
        log = open_log(tmp_path / "log.txt")
        logging.root.setLevel(logging.WARNING)
        log.info("quiet")
        log.warning("loud")
        logging.root.setLevel(logging.INFO)
        log.info("asked for")
    finally:
        logging.root.setLevel(level)
        logging.root.removeHandler(handler)
    assert stream.getvalue().split("\n") == ["loud", "asked for", ""]
    assert [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["quiet", "loud", "asked for"]
