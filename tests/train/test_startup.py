"""The report before the first step, on devices that tell how much memory they have."""
import dataclasses

import jax
import pytest
from tiny_config import tiny_train

import longmoe
from longmoe.train import startup
from longmoe.train.memory import training_memory


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
