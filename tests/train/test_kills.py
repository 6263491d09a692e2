"""SIGKILL at random moments, inside saves too: no checkpoint is lost, and every run ends where an undisturbed one does, to the bit."""
import json
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder, *arguments):
    done = subprocess.run([sys.executable, Path(__file__).parent / "kill_runs.py", folder, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["checkpoints_lost"] == 0 and found["runs_that_differ"] == 0 and done.returncode == 0, found
    return found


def test_saves_survive_kills(tmp_path):
    found = killed(tmp_path, "--kills", "6", "--saves-alone")
    assert found["kills"] == 6 and set(found["struck"]) - {"between saves"}


@pytest.mark.slow
def test_runs_survive_kills(tmp_path):
    """Muon, 4 micro-batches, mixed and packed text read 4 batches ahead. About half of the kills are meant to strike inside a save; more of them:
    `kill_runs.py --kills 20`."""
    found = killed(tmp_path, "--kills", "6")
    assert found["kills"] == 6 and sum(count for what, count in found["struck"].items() if what != "between saves") >= 1
