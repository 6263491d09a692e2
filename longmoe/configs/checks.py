"""What the configurations' own checks are made of."""
from typing import Any


def check(ok: bool, message: str) -> None:
    """ValueError with the message where not ok."""
    if not ok:
        raise ValueError(message)


def positive(config: Any, *names: str) -> None:
    """ValueError for a field of these that is not above 0."""
    for name in names:
        value = getattr(config, name)
        check(value > 0, f"{type(config).__name__}.{name}: got {value}, wanted a positive number")
