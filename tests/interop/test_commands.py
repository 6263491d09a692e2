"""longmoe import-hf and export-hf."""
from pathlib import Path

import pytest

from longmoe.cli import main
from longmoe.interop.folders import load_model

K3 = Path(__file__).parents[1] / "oracle" / "data" / "k3_s1"


def test_there_and_back(tmp_path, capsys):
    assert main(["import-hf", str(K3), "--out", str(tmp_path / "model")]) == 0
    config, variables = load_model(tmp_path / "model")
    assert config.param_dtype == "float32" and variables["router_state"]
    assert main(["export-hf", str(tmp_path / "model"), "--out", str(tmp_path / "export")]) == 0
    assert main(["export-hf", str(tmp_path / "model"), "--out", str(tmp_path / "packed"), "--pack-experts", "floor", "--max-shard-bytes", "300000"]) == 0
    assert "parameters" in capsys.readouterr().out
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 2
    # k3_s1's tensors lie in the order of another writer; a second trip gives the same bytes.
    assert main(["import-hf", str(tmp_path / "export"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert main(["import-hf", str(K3), "--out", str(tmp_path / "narrow"), "--dtype", "bfloat16"]) == 0
    assert load_model(tmp_path / "narrow")[1]["params"]["lm_head"].dtype == "bfloat16"


@pytest.mark.parametrize("arguments, message", [
    (["import-hf", "{tmp}", "--out", "{tmp}/x"], "holds no config.json, wanted a checkpoint's folder"),
    (["import-hf", str(K3), "--out", "{tmp}"], "which exists, wanted a new or an empty folder"),
    (["export-hf", str(K3), "--out", "{tmp}/x"], "holds no model_config.json, wanted a folder that save_model or `longmoe import-hf` wrote")])
def test_mistakes_are_said(tmp_path, capsys, arguments, message):
    (tmp_path / "file").touch()
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_spoiled_folder_is_refused(tmp_path):
    assert main(["import-hf", str(K3), "--out", str(tmp_path / "model")]) == 0
    file = tmp_path / "model" / "model_config.json"
    file.write_text(file.read_text().replace('"vocab_size": 139', '"vocab_size": 140'))
    with pytest.raises(ValueError, match=r"params/embedding: got \[139, 64\], wanted \[140, 64\]"):
        load_model(tmp_path / "model")
