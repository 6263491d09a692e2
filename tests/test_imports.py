"""The import graph: one way only, no cycles, no private names, and single owners of orbax and of meshes."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL_SIDE = {"configs", "presets", "shapes", "balancing", "parallel", "model", "pallas_kernels"}
USERS = MODEL_SIDE | {"data"}
# room of the package -> rooms that it may import, itself apart
ALLOWED = {
    "configs": {"shapes"}, "shapes": set(), "presets": {"configs", "shapes"}, "balancing": {"configs", "shapes"}, "plotting": set(),
    "parallel": {"configs", "shapes", "pallas_kernels"}, "model": MODEL_SIDE, "data": {"configs", "shapes"},
    "train": USERS, "evaluation": USERS, "inference": USERS, "rl": USERS | {"inference", "train"},
    "planner": USERS | {"train", "inference"}, "interop": {"configs", "presets", "shapes", "model"}, "pallas_kernels": set(),
}
TOP = {"bench_moe", "cli", "commands", "eval_commands", "eval_files", "eval_report", "plan_commands", "stage_gates", "longmoe", "__main__"}
"""They may import everything."""
EXTERNAL_OF_KERNELS = {"jax", "jaxlib", "jaxtyping", "numpy"}


def package_files() -> list[Path]:
    return sorted(p for package in ("longmoe", "pallas_kernels") for p in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "longmoe" and len(parts) > 1 else parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def imports(path: Path, *, at_import_time: bool = False) -> list[tuple[str, str | None, int]]:
    """(module, imported name or None, line). `at_import_time` leaves out imports inside functions and under TYPE_CHECKING."""
    found = []
    nodes = _top_level(tree(path)) if at_import_time else ast.walk(tree(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, None, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full module name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None, node.lineno) if is_module(whole) else (node.module, alias.name, node.lineno))
    return found


def _top_level(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _top_level(child)


def internal(module: str) -> bool:
    return module.split(".")[0] in ("longmoe", "pallas_kernels")


def test_every_room_has_a_place():
    known = set(ALLOWED) | TOP
    unknown = {room(module_name(p)) for p in package_files()} - known
    assert not unknown, f"rooms without a rule: {unknown}; say in ALLOWED what they may import"


def test_imports_go_one_way():
    wrong = []
    for path in package_files():
        here = room(module_name(path))
        if here in TOP:
            continue
        for module, _, line in imports(path):
            there = room(module)
            if internal(module) and there != here and there not in ALLOWED[here]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_kernels_stand_alone():
    wrong = [f"{path.relative_to(ROOT)}:{line}: {module}" for path in package_files() if module_name(path).startswith("pallas_kernels")
             for module, _, line in imports(path)
             if module.split(".")[0] not in EXTERNAL_OF_KERNELS | {"pallas_kernels"} | set(sys.stdlib_module_names)]
    assert not wrong, "\n".join(wrong)


def test_no_cycles():
    graph = {module_name(p): {m for m, _, _ in imports(p, at_import_time=True) if internal(m)} for p in package_files()}
    done, path = set(), []

    def visit(module: str):
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module):], module])
        if module in done:
            return
        path.append(module)
        for target in sorted(graph.get(module, ())):
            visit(target)
        path.pop()
        done.add(module)

    for module in graph:
        visit(module)


def test_no_private_names_of_other_modules():
    private = lambda name: name.startswith("_") and not name.startswith("__")
    wrong = []
    for path in [*package_files(), *sorted((ROOT / "experiments").glob("*.py"))]:
        where = path.relative_to(ROOT)
        modules = set()
        for module, name, line in imports(path):
            if internal(module) and (private(module.split(".")[-1]) or name is not None and private(name)):
                wrong.append(f"{where}:{line}: {module} {name or ''}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if internal(alias.name)}
            elif isinstance(node, ast.ImportFrom):
                modules |= {alias.asname or alias.name for alias in node.names if is_module(f"{node.module}.{alias.name}") and internal(node.module)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value).split(".")[0] in modules:
                wrong.append(f"{where}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library, owner", [("orbax", "longmoe/train/checkpoints.py")])
def test_single_importer(library, owner):
    importers = {path.relative_to(ROOT).as_posix() for path in package_files() for module, _, _ in imports(path) if module.split(".")[0] == library}
    assert importers <= {owner}


def test_meshes_are_made_in_one_place():
    makers = set()
    for path in package_files():
        from_jax = {name for module, name, _ in imports(path) if module.split(".")[0] == "jax"}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                named = called in ("Mesh", "make_mesh") and called in from_jax
                if named or called.startswith("jax.") and called.split(".")[-1] in ("Mesh", "make_mesh"):
                    makers.add(path.relative_to(ROOT).as_posix())
    assert makers <= {"longmoe/parallel/mesh.py"}


def test_import_is_quick_and_touches_no_device():
    code = ("import time; t = time.process_time(); import longmoe; t = time.process_time() - t; "
            "from jax._src import xla_bridge as b; assert not b._backends, 'a backend was initialised at import'; print(t)")
    seconds = min(float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout) for _ in range(3))
    assert seconds < 1.5, f"import longmoe takes {seconds:.2f} s of CPU time; load the heavy parts lazily"
