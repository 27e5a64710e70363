"""The architecture of a model as JSON values, and where two of them differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from shardwright.core.model.table import ModelTable

PREFIX = "architecture"
NOT_IN_WEIGHTS = ("architecture.initializer_stddev", "architecture.experts.capacity_factor")
"""Values that may differ between two models with the same weights: they affect how weights begin, or how they are used."""


def architecture_values(table: ModelTable) -> dict[str, Any]:
    """The architecture under dotted keys, as a checkpoint records it: ``architecture.rope.theta``."""
    return _flattened(PREFIX, asdict(table.architecture))


def differences_of_weights(
    found: Mapping[str, Any], needed: Mapping[str, Any], permitted: Collection[str] = ()
) -> list[str]:
    """One line for each value by which the weights of one model are not those of another. Only values that both have count.

    ``permitted``: keys of values that may differ.
    """
    ignored = (*NOT_IN_WEIGHTS, *permitted)
    keys = [key for key in needed if key.startswith(f"{PREFIX}.") and key in found and key not in ignored]
    return [
        f"  {key.removeprefix(f'{PREFIX}.')}: {found[key]!r}, not {needed[key]!r}"
        for key in keys
        if found[key] != needed[key]
    ]


def _flattened(name: str, value: Any) -> dict[str, Any]:
    """A value as JSON under ``name``; a dict is flattened, with its keys joined by dots."""
    if isinstance(value, dict):
        return {key: leaf for field in value for key, leaf in _flattened(f"{name}.{field}", value[field]).items()}
    return {name: json.loads(json.dumps(value))}
