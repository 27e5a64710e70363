"""The same model as a command line: the nearest named size, and every dimension that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from shardwright.interop.hugging_face.config import Model
from shardwright.models import FAMILIES, build


def nearest_named(model: Model) -> tuple[str, Mapping[str, str]]:
    """The named model with the fewest different dimensions, and the ``--set`` values that turn it into this one."""
    return nearest_of(model.family, model.size.config)


def nearest_of(family: str, config: Any) -> tuple[str, Mapping[str, str]]:
    """As ``nearest_named``, of a family and dimensions."""
    sizes = FAMILIES[family][0]
    found = {f"{family}-{name}": _changes(size.config, config) for name, size in sizes.items()}
    name = min(found, key=lambda each: len(found[each]))
    return name, found[name]


def command(model: Model) -> str:
    """The arguments of ``shardwright plan``."""
    name, changes = nearest_named(model)
    settings = " ".join(f"{key}={value}" for key, value in changes.items())
    dtype = "" if model.size.dtype == build(name).dtype else f" --dtype {model.size.dtype}"
    return f"{name} --set {settings}{dtype}" if settings else f"{name}{dtype}"


def _changes(old: Any, new: Any, prefix: str = "") -> dict[str, str]:
    changes: dict[str, str] = {}
    for field in fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if is_dataclass(after):
            changes.update(_changes(before, after, f"{prefix}{field.name}."))
        elif before != after:
            changes[prefix + field.name] = _text(after)
    return changes


def _text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
