"""Which implementation runs, who decides, and what a refusal says."""
import logging

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import UnsupportedError, dispatch, kernel_report, use_implementation


@pytest.fixture
def operator(monkeypatch):
    """`mosaic_gpu` has two requirements, `xla` wants size < 100, `reference` takes everything. Unknown to the real registry."""
    monkeypatch.setattr(dispatch, "_operators", {})
    monkeypatch.setattr(dispatch, "_announced", set())
    wants = lambda requirement, met: [] if met else [requirement]
    return dispatch.register(dispatch.Operator(
        name="twice", example=dict(size=8, dtype="float32"),
        unmet=dict(mosaic_gpu=lambda size, dtype: wants("wants bfloat16", dtype == "bfloat16") + wants("wants size a multiple of 64", size % 64 == 0),
                   xla=lambda size, dtype: wants("wants size under 100", size < 100), reference=lambda size, dtype: [])))


@pytest.mark.parametrize("size,dtype,chosen", [(64, "bfloat16", "mosaic_gpu"), (64, "float32", "xla"), (8, "bfloat16", "xla"), (100, "float32", "reference")])
def test_auto_takes_the_first_that_can(operator, size, dtype, chosen):
    assert dispatch.choose(operator, "auto", size=size, dtype=dtype) == chosen


def test_kernels_want_no_mesh_that_xla_would_have_to_undo():
    """Two devices: refused under jit, taken inside shard_map; a mesh of one device changes nothing."""
    sentences = []

    def look(x):
        sentences.append([sentence for sentence in dispatch.unmet_on_hopper() if sentence.startswith("mesh")])
        return x

    for devices in (1, 2):
        mesh = jax.sharding.AbstractMesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(jax.jit(look), jnp.zeros(4))
            jax.eval_shape(jax.jit(jax.shard_map(look, in_specs=jax.P("data"), out_specs=jax.P("data"))), jnp.zeros(4))
    assert [len(found) for found in sentences] == [0, 0, 1, 0]
    assert "['data']" in sentences[2][0] and "shard_map" in sentences[2][0]


def test_a_name_never_falls_back(operator):
    assert dispatch.choose(operator, "reference", size=64, dtype="bfloat16") == "reference"
    with pytest.raises(UnsupportedError) as refusal:
        dispatch.choose(operator, "mosaic_gpu", size=100, dtype="float32")
    assert all(text in str(refusal.value) for text in ("twice", "mosaic_gpu: wants bfloat16", "mosaic_gpu: wants size a multiple of 64"))
    assert "xla" not in str(refusal.value)


def test_a_tuple_is_tried_in_its_own_order(operator):
    choose = lambda names, size: dispatch.choose(operator, names, size=size, dtype="float32")
    assert choose(("reference", "xla"), 8) == "reference"
    assert choose(("mosaic_gpu", "xla"), 8) == "xla"
    assert choose(("mosaic_gpu", "xla", "reference"), 100) == "reference"
    with pytest.raises(UnsupportedError) as refusal:
        choose(("mosaic_gpu", "xla"), 100)
    assert all(text in str(refusal.value) for text in ("mosaic_gpu: wants bfloat16", "mosaic_gpu: wants size", "xla: wants size under 100"))


def test_refusal_is_a_value_error():
    assert issubclass(UnsupportedError, ValueError)


@pytest.mark.parametrize("unknown", ["triton", ("xla", "triton"), ()])
def test_unknown_names(operator, unknown):
    with pytest.raises(ValueError, match="wanted 'auto', one of"):
        dispatch.choose(operator, unknown, size=8, dtype="float32")
    with pytest.raises(ValueError, match="wanted 'auto', one of"):
        use_implementation(unknown)


def test_override_reaches_auto_alone_and_ends(operator):
    choose = lambda name: dispatch.choose(operator, name, size=8, dtype="float32")
    with use_implementation("reference"):
        assert choose("auto") == "reference"
        assert choose("xla") == "xla"
        with use_implementation(("mosaic_gpu", "xla")):
            assert choose("auto") == "xla"
        assert choose("auto") == "reference"
        with pytest.raises(UnsupportedError), use_implementation("mosaic_gpu"):
            choose("auto")
        with use_implementation("auto"):
            assert choose("auto") == "xla"
    assert choose("auto") == "xla"


def test_override_ends_with_an_exception(operator):
    with pytest.raises(RuntimeError), use_implementation("reference"):
        raise RuntimeError
    assert dispatch.choose(operator, "auto", size=8, dtype="float32") == "xla"


def test_choice_is_logged_once_with_its_reason(operator, caplog):
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    for _ in range(3):
        dispatch.choose(operator, "auto", size=64, dtype="float32")
    (record,) = caplog.records
    assert record.getMessage() == "twice runs as xla (not mosaic_gpu: wants bfloat16)"
    dispatch.choose(operator, "auto", size=64, dtype="bfloat16")
    assert [r.getMessage() for r in caplog.records[1:]] == ["twice runs as mosaic_gpu"]


@pytest.mark.parametrize("backend,level", [("gpu", logging.WARNING), ("cpu", logging.INFO)])
def test_falling_short_of_the_kernel_is_a_warning_on_a_gpu(operator, caplog, monkeypatch, backend, level):
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: backend)
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    dispatch.choose(operator, "auto", size=64, dtype="float32")
    assert [r.levelno for r in caplog.records] == [level]


def test_report_has_a_row_for_each_operator_and_implementation(operator):
    rows = [line.split() for line in kernel_report().splitlines()]
    assert rows[0] == ["operator", "implementation", "available", "reason"]
    assert [row[:3] for row in rows[1:]] == [["twice", "mosaic_gpu", "no"], ["twice", "xla", "yes"], ["twice", "reference", "yes"]]
    assert "wants bfloat16; wants size a multiple of 64" in kernel_report()


def test_report_knows_the_real_operators():
    assert {line.split()[0] for line in kernel_report().splitlines()[1:]} >= {"kda", "grouped_matmul"}
