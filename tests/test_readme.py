"""The README's commands and code, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Checked elsewhere: `make check` runs the demo and installs the wheel.
NOT_HERE = ("make ", "pip install ", "python3.12 -m venv ")
SMALLER = {"--steps 300": "--steps 2", "path/to/files": "files"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_file_named_exists():
    named = re.findall(r"`((?:longmoe|pallas_kernels|experiments|tests)/[\w/.]*)`|\]\((?!http)([^)]+)\)", README)
    missing = [path for pair in named for path in pair if path and not (ROOT / path).exists()]
    assert not missing


def test_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z0-9]+)`?", README)) <= targets


@pytest.mark.slow
def test_commands_run(tmp_path):
    (tmp_path / "files").mkdir()
    for source in sorted((ROOT / "longmoe").rglob("*.py")):
        (tmp_path / "files" / "_".join(source.relative_to(ROOT).parts)).write_text(source.read_text())
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    ran = 0
    for line in "\n".join(blocks("bash")).splitlines():
        if line.startswith(NOT_HERE):
            continue
        for long, short in SMALLER.items():
            line = line.replace(long, short)
        result = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{line}\n{result.stderr[-2000:]}"
        ran += 1
    assert ran >= 2


@pytest.mark.slow
def test_python_runs():
    for code in blocks("python"):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
