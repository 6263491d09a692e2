"""What a result says about the run that made it."""
import sys
from collections.abc import Sequence
from typing import Any

import jax

from longmoe.train.run_files import commit, versions


def run_record(script: str, argv: Sequence[str] | None, seconds: float) -> dict[str, Any]:
    """Versions, commit, device and command of this run. seconds: how long its parts held the device, over all calls if it was resumed."""
    command = " ".join(["python", f"experiments/{script}", *(sys.argv[1:] if argv is None else argv)])
    return dict(versions=versions(), commit=commit(), device=jax.devices()[0].device_kind, command=command, device_minutes=round(seconds / 60, 2))
