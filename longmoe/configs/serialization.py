"""Configurations as JSON, both ways."""
import dataclasses
import json
import types
import typing
from typing import Any

from longmoe.configs.checks import check


def to_json(config: Any) -> str:
    """Any config as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json[C](kind: type[C], text: str) -> C:
    """The config of class `kind` that `to_json` wrote. ValueError names fields that are unknown."""
    return _from_plain(kind, json.loads(text), kind.__name__)


def _from_plain(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        check(isinstance(value, dict), f"{path}: got {value!r}, wanted an object with some of {sorted(typing.get_type_hints(kind))}")
        fields = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(fields))
        check(not unknown, f"{path}: got unknown fields {unknown}, wanted some of {sorted(fields)}")
        return kind(**{name: _from_plain(fields[name], item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, list):
        item = next((a for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is tuple for a in typing.get_args(k)[:1]), None)
        return tuple(_from_plain(item, part, f"{path}[{i}]") for i, part in enumerate(value))
    if isinstance(kind, types.UnionType) and float in typing.get_args(kind) and isinstance(value, int):
        return float(value)
    return value
