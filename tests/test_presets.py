"""Every preset is, field by field, the one in tests/golden/presets/, so that a change of a default shows which named configuration it changes.

    python tests/test_presets.py     writes the files anew, after a change that is meant
"""
import json
from pathlib import Path

import pytest

from longmoe.configs import TrainConfig, from_json, to_json
from longmoe.presets import PRESETS

GOLDEN = Path(__file__).parent / "golden" / "presets"


def test_every_preset_has_a_snapshot():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_its_snapshot(name):
    text = (GOLDEN / f"{name}.json").read_text()
    assert json.loads(to_json(PRESETS[name]())) == json.loads(text), "renew with `python tests/test_presets.py` if the change is meant"
    assert from_json(TrainConfig, text) == PRESETS[name]()


if __name__ == "__main__":
    for name, preset in PRESETS.items():
        (GOLDEN / f"{name}.json").write_text(to_json(preset()) + "\n")
