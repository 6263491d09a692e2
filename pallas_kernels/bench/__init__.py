"""Benchmarks of the operators, each a `main(arguments)` with flags of its own: `longmoe bench` runs them, from an installed wheel too."""
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def commit() -> str:
    """Commit of the source tree that this package lies in; empty outside a repository."""
    try:
        found = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def command(operator: str, arguments: Sequence[str] | None) -> str:
    """The command line of a run, for its record."""
    return " ".join(["python", *sys.argv] if arguments is None else ["longmoe", "bench", operator, *arguments])
