"""Kimi K3 at full size on 8 simulated devices: lowered whole, and compiled at two layers to read what moves between devices."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lower_k3 import lowered


@pytest.mark.slow
def test_whole_step_lowers_in_a_minute_and_four_gigabytes(slowness):
    found = json.loads(subprocess.run([sys.executable, Path(__file__).parent / "lower_k3.py"], check=True, capture_output=True, text=True).stdout)
    print({name: value for name, value in found.items() if name != "experts"})
    assert found["devices"] == 8 and found["parameters"] == 2_779_484_393_568
    assert min(found["seconds"], found["cpu_seconds"]) < 60 * slowness and found["max_bytes"] < 4e9
    # Parameters and both moments: the expert axis stands right behind the axis of scanned repeats, if there is one.
    assert len(found["experts"]) % 6 == 0 and all("expert" in spec[:2] for spec in found["experts"].values())


@pytest.mark.exhaustive
def test_no_device_gathers_a_whole_expert_stack():
    step, _ = lowered(num_layers=2, tokens=64)
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])[^=]* all-gather(?:-start)?\(", step.compile().as_text())
    assert gathered, "an expert-parallel step gathers tokens"
    stacks = [shape for shape in gathered if re.match(r"\w+\[(\d+,)?896,\d+,\d+", shape)]
    assert not stacks, stacks
