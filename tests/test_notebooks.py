"""The notebooks: how they are stored, what each must have, and that every cell runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
CELL_LINES = 14
CELL_SECONDS = 300
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def python(cell: str) -> ast.Module:
    return ast.parse("\n".join("" if line.startswith("%") else line for line in cell.splitlines()))


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs all cells in `folder`, by this interpreter, on one CPU device. CellExecutionError, with the cell and its traceback, where one fails."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}      # the suite's eight simulated devices
    environment |= {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "IPYTHONDIR": str(folder / "ipython"),
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    client = NotebookClient(notebook, kernel_name="python3", timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    client.km.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])    # a "python3" that the user has set up may be another interpreter
    client.execute(env=environment)


@pytest.mark.slow
@each_notebook
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = read(path)
    execute(notebook, folder)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no cell shows a plot"


def test_stored_form():
    checked = subprocess.run([sys.executable, FOLDER / "clean.py", "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for path in PATHS:
        assert all(cell.outputs == [] and cell.execution_count is None for cell in read(path).cells if cell.cell_type == "code"), path.name


def test_clean_removes_outputs_and_counts(tmp_path):
    (tmp_path / "clean.py").write_text((FOLDER / "clean.py").read_text())
    notebook = read(PATHS[0])
    notebook.metadata["widgets"] = {}
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.update(execution_count=3, id="other", metadata={"collapsed": True}, outputs=[nbformat.v4.new_output("stream", text="x")])
    nbformat.write(notebook, tmp_path / PATHS[0].name)
    run = lambda *arguments: subprocess.run([sys.executable, tmp_path / "clean.py", *arguments], capture_output=True, text=True)
    refused = run("--check")
    assert refused.returncode == 1 and PATHS[0].name in refused.stderr and "clean.py" in refused.stderr
    assert run().returncode == 0
    assert (tmp_path / PATHS[0].name).read_text() == PATHS[0].read_text()


def test_code_is_clean():
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", FOLDER], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@each_notebook
def test_begins_with_prose_and_the_install_cell(path):
    title, install, *_ = read(path).cells
    assert title.cell_type == "markdown" and title.source.startswith("# ") and "Colab" in title.source
    assert install.source == code_cells(read(PATHS[0]))[0], "the install cell is the same in every notebook"
    for needed in ("sys.version_info < (3, 12)", 'find_spec("longmoe")', "pip", "import longmoe"):
        assert needed in install.source


def test_the_install_cell_installs_what_lies_beside_it(tmp_path):
    """With pip and the package's presence played: which source is taken, and what is said where there is none."""
    install = code_cells(read(PATHS[0]))[0]
    played = ("import importlib.util, subprocess\nimportlib.util.find_spec = lambda name: None\n"
              "subprocess.run = lambda command, check: print('RAN', command)\n")
    run = lambda: subprocess.run([sys.executable, "-c", played + install], cwd=tmp_path, capture_output=True, text=True,
                                 env={**os.environ, "PYTHONPATH": str(ROOT)})
    missing = run()
    assert missing.returncode != 0 and "upload its wheel" in missing.stderr
    (tmp_path / "longmoe-0.1.0-py3-none-any.whl").touch()
    found = run()
    assert found.returncode == 0 and re.search(r"RAN .*'pip', 'install'.*/longmoe-0\.1\.0-py3-none-any\.whl'\]", found.stdout), found.stderr


@each_notebook
def test_has_a_plot_and_short_cells(path):
    cells = code_cells(read(path))
    assert any("%matplotlib inline" in cell for cell in cells)
    assert any(name in "\n".join(cells) for name in ("longmoe.plotting", "matplotlib.pyplot"))
    long = [cell for cell in cells[1:] if len(cell.splitlines()) > CELL_LINES]
    assert not long, f"cells of more than {CELL_LINES} lines:\n" + "\n\n".join(long)


@each_notebook
def test_uses_public_names(path):
    private = lambda name: any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    wrong = []
    for node in (node for cell in code_cells(read(path)) for node in ast.walk(python(cell))):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        wrong += [name for name in names if private(name)]
    assert not wrong


def test_index_lists_all_in_order():
    listed = re.findall(r"\]\((\d\d_\w+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert listed == [path.name for path in PATHS]


@each_notebook
def test_files_named_exist(path):
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [FOLDER / link for link in re.findall(r"\]\((?!http)([^)#]+)\)", prose)]
    named = [ROOT / name for name in re.findall(r"`((?:longmoe|pallas_kernels|experiments|notebooks|docs)/[\w/]+\.\w+)`", prose)]
    assert not [file for file in links + named if not file.exists()]
