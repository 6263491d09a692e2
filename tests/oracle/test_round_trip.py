"""save_hf(load_hf(x)) gives every tensor of x again, to the bit: all checkpoints of the golden vectors, in one file and in shards."""
import numpy as np
import pytest
from oracle_models import MODELS
from oracle_vectors import cases, checkpoint, load_arrays

from longmoe import load_hf, save_hf


@pytest.mark.parametrize("case", [case for kind in MODELS for case in cases(kind)])
def test_every_tensor_to_the_bit(case, tmp_path):
    source = checkpoint(case, tmp_path / "source")
    config, variables = load_hf(source)
    rule = "floor" if case.endswith("mxfp4") else None
    save_hf(config, variables, tmp_path / "whole", pack_experts=rule)
    save_hf(config, variables, tmp_path / "shards", pack_experts=rule, max_shard_bytes=200_000)
    wanted = load_arrays(source / "model.safetensors")
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for got in (load_arrays(tmp_path / "whole" / "model.safetensors"), {name: x for file in files for name, x in load_arrays(file).items()}):
        assert set(got) == set(wanted)
        different = [name for name, x in wanted.items() if x.dtype != got[name].dtype or x.shape != got[name].shape or x.tobytes() != got[name].tobytes()]
        assert not different
    again = load_hf(tmp_path / "shards")
    assert again[0] == config
    for got, want in zip(np.asarray(again[1]["params"]["lm_head"]), np.asarray(variables["params"]["lm_head"])):
        np.testing.assert_array_equal(got, want)
