"""Fixtures, eight simulated CPU devices, and two rules that the suite holds itself to: no test leaves JAX's configuration
changed, and no room takes longer than its budget."""

import os

# JAX reads both when it is first imported. A run on a GPU sets JAX_PLATFORMS itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch

# Seconds of one core, by room (the folder under tests/), on the machine where REFERENCE_SECONDS were measured.
# "fast" is what `make test` runs, "slow" what `make check` adds.
BUDGETS = {
    "fast": {"pallas_kernels": 300, "model": 280, "train": 300, "inference": 120, "multidevice": 120, "top": 270, "data": 30, "evaluation": 60,
             "balancing": 45, "oracle": 150, "interop": 90, "experiments": 60},
    "slow": {"pallas_kernels": 540, "multidevice": 660, "model": 300, "train": 300, "inference": 300, "oracle": 420, "top": 420},
}
DEFAULT_BUDGETS = {"fast": 120, "slow": 240}
TEST_MINUTES, LONGEST_MINUTES = 15, 25
"""Wall time of `make test` that two cores are meant to take, and at which it fails: two virtual cores may share one real one."""
REFERENCE_SECONDS = 1.35
"""What `reference_seconds` gave there, one in each of two processes. A slower machine gets proportionally more of everything."""
ENOUGH = 1.5
"""Over its budget by more than this, a room fails the suite; below, it is only told: on shared cores the same tests vary that much."""
QUICK_ROOMS = {"model", "train", "inference", "multidevice", "evaluation", "interop", "experiments", "top"}
"""Rooms whose time is compilation: XLA leaves out its expensive passes there. The operators' rooms are compiled as users compile them."""

_spent: dict[tuple[str, str], float] = defaultdict(float)
_references: list[float] = []
_began = time.monotonic()


@pytest.fixture(scope="session", autouse=True)
def programs_compile_once(tmp_path_factory):
    """Programs that several tests make anew (each `fit` jits its own step) are compiled once: a session, or a `make check`, which names a folder."""
    before = jax.config.jax_compilation_cache_dir
    if before is None:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """Every loaded program holds memory maps, of which Linux gives a process 65,530: the whole suite would run out of them and crash."""
    yield
    jax.clear_caches()


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def slowness() -> float:
    """How many times as long as on the machine that times are stated for, as measured when the session began."""
    return _slowness()


@pytest.fixture(autouse=True)
def jax_config_stays():
    before = dict(jax.config.values)
    yield
    after = dict(jax.config.values)
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    for name, (value, _) in changed.items():
        jax.config.update(name, value)
    assert not changed, f"the test left jax.config changed (name: (before, after)): {changed}; use the setting's context manager"


def _seconds() -> tuple[float, float]:
    times = os.times()
    return time.monotonic(), times.user + times.system + times.children_user + times.children_system


def reference_seconds() -> float:
    """Seconds of one core to trace and compile a program of fixed size, which is what most of the suite's time goes into."""
    def f(weights, x):
        for i, weight in enumerate(weights):
            x = jnp.tanh(x @ weight * salt) * jax.nn.softmax(x + i)
            x = jax.lax.scan(lambda carry, row: (jnp.sin(carry + row), carry * row), x[0], x)[1]
        return jnp.sum(x)

    # Another program each time, or it would be read and not compiled.
    salt = 1 + 1e-3 * (time.time_ns() % 1009)
    _, before = _seconds()
    jax.jit(jax.value_and_grad(f)).lower([jnp.ones((16, 16))] * 8, jnp.ones((16, 16))).compile()
    return _seconds()[1] - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    wall, cpu = _seconds()
    # Here rather than in a fixture, so that it also holds for fixtures of a wider scope.
    jax.config.update("jax_disable_most_optimizations", _room(item) in QUICK_ROOMS)
    try:
        return (yield)
    finally:
        wall_after, cpu_after = _seconds()
        tier = "slow" if any(item.get_closest_marker(mark) for mark in ("slow", "h200", "gpu")) else "fast"
        # CPU time caps wall time, so that other work on the machine does not fail the suite.
        _spent[tier, _room(item)] += min(wall_after - wall, cpu_after - cpu)


def _room(item) -> str:
    parts = Path(item.path).relative_to(Path(__file__).parent).parts
    return parts[0] if len(parts) > 1 else "top"


def pytest_sessionstart(session):
    if not session.config.option.collectonly and not _has_workers(session.config):
        _references.append(reference_seconds())


def _has_workers(config) -> bool:
    """Whether this process only hands tests out (to the processes of pytest-xdist)."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for key, seconds in getattr(node, "workeroutput", {}).get("spent", {}).items():
        _spent[tuple(key.split(":"))] += seconds
    _references.extend(getattr(node, "workeroutput", {}).get("references", []))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    if not _has_workers(session.config) and _references:
        jax.config.update("jax_disable_most_optimizations", False)
        _references.append(reference_seconds())
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput.update(spent={":".join(key): seconds for key, seconds in _spent.items()}, references=_references)
    elif exitstatus == pytest.ExitCode.OK and _over_budget(ENOUGH):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _slowness() -> float:
    """How many times as long as on the reference machine things take here, at least 1."""
    return max([1.0, *(seconds / REFERENCE_SECONDS for seconds in _references)])


def _over_budget(times: float = 1.0) -> list[str]:
    lines = [f"{room} ({tier}): {spent:.0f} s, budget {_budget(tier, room):.0f} s"
             for (tier, room), spent in sorted(_spent.items()) if spent > times * _budget(tier, room)]
    minutes, limit = (time.monotonic() - _began) / 60, LONGEST_MINUTES * _slowness()
    return lines + [f"all fast tests: {minutes:.1f} minutes, at most {limit:.1f}"] * (_only_fast() and minutes > limit)


def _only_fast() -> bool:
    return {tier for tier, _ in _spent} == {"fast"}


def _budget(tier: str, room: str) -> float:
    return BUDGETS[tier].get(room, DEFAULT_BUDGETS[tier]) * _slowness()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("time by room")
    for (tier, room), spent in sorted(_spent.items()):
        terminalreporter.write_line(f"{room:20s} {tier:5s} {spent:6.1f} s of {_budget(tier, room):.0f}")
    terminalreporter.write_line(f"this machine takes {_slowness():.2f} times as long as the one that the budgets are for ({_references})")
    if _only_fast():
        terminalreporter.write_line(f"{(time.monotonic() - _began) / 60:.1f} minutes, meant to take {TEST_MINUTES * _slowness():.1f}")
    for line in _over_budget():
        terminalreporter.write_line(f"OVER BUDGET: {line}; make its tests cheaper, or mark the long ones slow", red=True)


@pytest.fixture
def as_on_hopper(monkeypatch) -> None:
    """Operators are chosen as on a Hopper GPU: for lowering and compiling for one, not for running."""
    for operator in dispatch._operators.values():
        monkeypatch.setattr(sys.modules[operator.unmet["mosaic_gpu"].__module__], "unmet_on_hopper", list)
