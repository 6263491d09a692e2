"""Checkpoints on disk: what is stored, which are kept, which count as complete, and every kind of damage. States are made up: no model is compiled."""
import dataclasses
import errno
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from tiny_config import tiny_train

import longmoe
from longmoe.configs import CheckpointConfig, MeshConfig
from longmoe.train import checkpoints as checkpoints_module
from longmoe.train import manifest
from longmoe.train.checkpoints import Checkpoints, complete_steps, delete_checkpoints
from longmoe.train.state import TrainState, init_train_state

CFG = tiny_train()


class Killed(BaseException):
    """What a kill does to a save: nothing after it runs."""


def made_up(step):
    keys = jax.random.split(jax.random.key(step), 4)
    params = {"embedding": jax.random.normal(keys[0], (8, 4)), "layer_00": {"gate": jax.random.normal(keys[1], (3, 5, 7), jnp.bfloat16)}}
    return TrainState(step=jnp.int32(step), params=params, router_state={"layer_00": jax.random.normal(keys[2], (6,))},
                      opt_state=({"mu": jax.tree.map(jnp.square, params)}, ()), rng=keys[3])


def like():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), jax.eval_shape(lambda: made_up(0)))


def plain(state):
    return jax.tree.map(np.asarray, state.replace(rng=jax.random.key_data(state.rng)))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, plain(a), plain(b))


def save(directory, *steps, **config):
    with Checkpoints(epath.Path(directory), CheckpointConfig(**config)) as checkpoints:
        for step in steps:
            checkpoints.save(step, made_up(step), {"next": step, "source": "text"}, CFG)


def restore(directory, step, cfg=CFG):
    with Checkpoints(epath.Path(directory), CheckpointConfig()) as checkpoints:
        return checkpoints.restore(step, like(), cfg)


def refusal(directory, step=4):
    with pytest.raises(ValueError) as refused:
        restore(directory, step)
    return str(refused.value)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(directory, 2, 4)
    return directory


@pytest.fixture
def saved(saved_once, tmp_path):
    """Complete steps 2 and 4, to be damaged."""
    return shutil.copytree(saved_once, tmp_path / "checkpoints")


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != manifest.NAME)


def largest(folder):
    return max(files_of(folder), key=lambda path: path.stat().st_size)


def test_what_goes_in_comes_out(saved):
    for step in (2, 4):
        state, data_state = restore(saved, step)
        assert_same(state, made_up(step))
        assert data_state == {"next": step, "source": "text"}
        assert jnp.array_equal(jax.random.bits(state.rng), jax.random.bits(made_up(step).rng))
    record = json.loads(next(path for path in files_of(saved / "4" / "record") if path.name == "metadata").read_text())
    assert set(record) == {"config", "data", "versions"} and record["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("config,kept", [(dict(keep=1), [7]), (dict(keep=3), [5, 6, 7]), (dict(keep=1, keep_every=3), [3, 6, 7]),
                                         (dict(keep=2, keep_every=2), [2, 4, 6, 7])])
def test_which_are_kept(tmp_path, config, kept):
    save(tmp_path, *range(1, 8), **config)
    assert complete_steps(epath.Path(tmp_path)) == kept == sorted(int(path.name) for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"resume_from: got 17, wanted a complete checkpoint .* steps"):
        restore(tmp_path, 17)


def test_keep_every_is_checked():
    with pytest.raises(ValueError, match="keep_every: got 0, wanted None or a positive number"):
        CheckpointConfig(keep_every=0)


def test_every_flipped_byte_is_found(saved):
    """In any file of the folder, first, middle and last byte; Orbax itself loads many of these."""
    for path in files_of(saved / "4"):
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1} if whole else ():
            flipped = bytearray(whole)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            name = path.relative_to(saved / "4").as_posix()
            assert manifest.damage(epath.Path(saved / "4"), 4) == [f"the contents of {name} are not those that were saved (SHA-256 differs)"]
        path.write_bytes(whole)
    assert manifest.damage(epath.Path(saved / "4"), 4) == []


def flip(saved):
    path = largest(saved / "4")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    return f"the contents of {path.relative_to(saved / '4')} are not those that were saved"


def truncate(saved):
    path = largest(saved / "4")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    return f"{path.relative_to(saved / '4')} has {size - 3} bytes, manifest.json says {size}"


def remove(saved):
    path = largest(saved / "4")
    path.unlink()
    return f"{path.relative_to(saved / '4')} is missing"


def add(saved):
    (saved / "4" / "model" / "notes.txt").write_text("mine")
    return "model/notes.txt is not in manifest.json"


def exchange(saved):
    first, second = (largest(saved / step / "model" / "ocdbt.process_0") for step in ("2", "4"))
    inside = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(inside)
    return f"{second.relative_to(saved / '4')} "


def exchange_parts(saved):
    (saved / "2" / "training").rename(saved / "aside")
    (saved / "4" / "training").rename(saved / "2" / "training")
    (saved / "aside").rename(saved / "4" / "training")
    return "is missing; and "


def exchange_steps(saved):
    (saved / "2").rename(saved / "aside")
    (saved / "4").rename(saved / "2")
    (saved / "aside").rename(saved / "4")
    return "manifest.json is that of step 2, wanted 4"


def empty_manifest(saved):
    (saved / "4" / manifest.NAME).write_text("")
    return "manifest.json (0 bytes) cannot be read"


def half_manifest(saved):
    path = saved / "4" / manifest.NAME
    path.write_text(path.read_text()[:200])
    return "manifest.json (200 bytes) cannot be read"


def hollow_manifest(saved):
    (saved / "4" / manifest.NAME).write_text('{"format": 1, "step": 4, "files": []}')
    return "manifest.json (37 bytes) cannot be read"


DAMAGE = [flip, truncate, remove, add, exchange, exchange_parts, exchange_steps, empty_manifest, half_manifest, hollow_manifest]


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda harm: harm.__name__)
def test_a_damaged_step_is_refused_by_name(saved, harm):
    sentence = harm(saved)
    said = refusal(saved)
    assert f"{saved / '4'}: this checkpoint is damaged" in said and sentence in said and "--resume-from (steps 2)" in said
    if "exchange" not in harm.__name__:
        assert_same(restore(saved, 2)[0], made_up(2))


@pytest.mark.parametrize("file", ["commit_success.txt", "_CHECKPOINT_METADATA", "model/_METADATA"])
def test_a_damaged_old_step_stands_in_nobodys_way(saved, file):
    (saved / "2" / file).unlink(missing_ok=True)
    assert_same(restore(saved, 4)[0], made_up(4))
    save(saved, 6, keep=1)
    assert complete_steps(epath.Path(saved)) == [6]


def test_another_config_is_refused_and_other_changes_are_logged(saved, caplog):
    other = dataclasses.replace(CFG, optim=dataclasses.replace(CFG.optim, eps=1e-6))
    with pytest.raises(ValueError, match=r"another config \(optim.eps: saved 1e-08, now 1e-06\)"):
        restore(saved, 4, other)
    with caplog.at_level(logging.INFO, "longmoe"):
        restore(saved, 4, dataclasses.replace(CFG, steps=50, mesh=MeshConfig(fsdp=1)))
    assert "step 4 was saved with config.steps 20, this run has 50" in caplog.text and "config.mesh.fsdp -1, this run has 1" in caplog.text


@pytest.mark.parametrize("moment", ["inside the save", "before the manifest", "inside the manifest", "before the old one goes", "inside the deletion"])
def test_a_kill_inside_a_save_loses_that_step_at_most(tmp_path, monkeypatch, moment, caplog):
    """keep=1, the hardest case: the old checkpoint is all there is until the new one is complete."""
    save(tmp_path, 1, 2, keep=1)

    def killed(*arguments, **keywords):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment == "inside the save":
            scratch = tmp_path / "3.orbax-checkpoint-tmp" / "model"
            patch.setattr(ocp.CheckpointManager, "save", lambda *_, **__: (scratch.mkdir(parents=True), killed()))
        elif moment == "before the manifest":
            patch.setattr(manifest, "write_manifest", killed)
        elif moment == "inside the manifest":
            patch.setattr(manifest, "replace_text", lambda path, text: (epath.Path(f"{path}.tmp").write_text(text[:100]), killed()))
        elif moment == "before the old one goes":
            patch.setattr(Checkpoints, "_discard", killed)
        else:
            patch.setattr(checkpoints_module, "_remove", lambda folder: ((folder / "_CHECKPOINT_METADATA").unlink(), killed()))
        save(tmp_path, 3, keep=1)
    completed = moment in ("before the old one goes", "inside the deletion")
    with caplog.at_level(logging.INFO, "longmoe"), Checkpoints(epath.Path(tmp_path), CheckpointConfig(keep=1)) as checkpoints:
        newest = checkpoints.steps()[-1]
        assert newest == (3 if completed else 2)
        assert_same(checkpoints.restore(newest, like(), CFG)[0], made_up(newest))
        assert all(manifest.is_complete(path) for path in epath.Path(tmp_path).iterdir())
        checkpoints.save(4, made_up(4), {}, CFG)
        assert checkpoints.steps() == [4]
    assert ("step 3 is not complete" in caplog.text and "stepping over it to step 2" in caplog.text) == (not completed)


def test_a_kill_inside_the_first_save_starts_over(tmp_path, caplog):
    """Twice. The folder is put aside: it looks like a checkpoint whose manifest was lost."""
    for _ in range(2):
        save(tmp_path, 2)
        (tmp_path / "2" / manifest.NAME).unlink()
        with caplog.at_level(logging.INFO, "longmoe"), Checkpoints(epath.Path(tmp_path), CheckpointConfig()) as checkpoints:
            assert checkpoints.steps() == [] and [path.name for path in tmp_path.iterdir()] == ["without-manifest-2"]
        assert "stepping over it to the beginning" in caplog.text and "put aside as" in caplog.text
    save(tmp_path, 2, 4, keep=1)
    assert complete_steps(epath.Path(tmp_path)) == [4]


def test_lost_manifests_are_no_reason_to_delete_checkpoints(saved):
    for step in (2, 4):
        (saved / str(step) / manifest.NAME).unlink()
    assert "got steps 2, 4 without manifest.json, wanted one in each" in refusal(saved)
    assert (saved / "4").exists()
    delete_checkpoints(epath.Path(saved))
    assert not saved.exists()


@pytest.mark.parametrize("where", ["orbax", "manifest"])
def test_a_full_disk_stops_with_the_older_checkpoints_intact(saved, monkeypatch, where):
    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((ocp.CheckpointManager, "save") if where == "orbax" else (manifest, "replace_text")), full)
        with pytest.raises(OSError, match=r"6: the checkpoint could not be written .*No space left on device.*Complete checkpoints: steps 2, 4; make room"):
            save(saved, 6, keep=1)
    for step in (2, 4):
        assert_same(restore(saved, step)[0], made_up(step))


def test_the_file_size_limit_of_the_system_reads_the_same(saved):
    """A real failure below Orbax, in tensorstore's own writes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(OSError, match="6: the checkpoint could not be written .*File too large"):
            save(saved, 6, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(restore(saved, 4)[0], made_up(4))


def test_later_steps_are_dropped_and_may_be_saved_again(saved):
    with Checkpoints(epath.Path(saved), CheckpointConfig(keep=9)) as checkpoints:
        checkpoints.drop_after(2)
        assert checkpoints.steps() == [2]
        for step in (3, 4):
            checkpoints.save(step, made_up(step + 10), {}, CFG)
        assert checkpoints.steps() == [2, 3, 4]
    assert_same(restore(saved, 4)[0], made_up(14))


def test_load_checkpoint_reads_the_model_alone(tmp_path):
    """The router's state comes with the parameters; the optimizer's files may even be damaged."""
    cfg = tiny_train(num_layers=2)
    mesh = longmoe.make_mesh(MeshConfig(), jax.devices()[:1])
    state = init_train_state(cfg, mesh, jax.random.key(3))
    state = state.replace(router_state=jax.tree.map(lambda x: x + 0.25, state.router_state))
    with pytest.raises(ValueError, match="run_dir: got .* which has no complete checkpoint"):
        longmoe.load_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with Checkpoints(epath.Path(tmp_path / "checkpoints"), CheckpointConfig(keep=2)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state.replace(step=jnp.int32(step)), {}, cfg)
    path = largest(tmp_path / "checkpoints" / "2" / "training")
    path.write_bytes(bytes(path.stat().st_size))
    config, variables = longmoe.load_checkpoint(tmp_path)
    assert config == cfg and set(variables) == {"params", "router_state"}
    jax.tree.map(np.testing.assert_array_equal, variables, {"params": state.params, "router_state": state.router_state})
    assert len(jax.tree.leaves(variables["params"])[0].sharding.device_set) == 1
    with pytest.raises(ValueError, match="step: got 3, wanted a complete checkpoint of .*: steps 1, 2"):
        longmoe.load_checkpoint(str(tmp_path), step=3)
    path = largest(tmp_path / "checkpoints" / "2" / "model")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="2: this checkpoint is damaged: model/.* bytes"):
        longmoe.load_checkpoint(tmp_path)
    longmoe.load_checkpoint(tmp_path, step=1)
