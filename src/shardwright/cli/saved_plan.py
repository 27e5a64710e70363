"""A plan as ``plan --json`` wrote it, read back and held against the contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.core.errors import InputError
from shardwright.core.roles import COMPONENTS
from shardwright.files import parse_json, read_text

TEXT, WHOLE = "a text", "a whole number"

PLAN = {"model": TEXT, "layout": TEXT, "engine": TEXT, "batch": WHOLE, "length": WHOLE}
TENSOR = {
    "name": TEXT,
    "kind": TEXT,
    "component": TEXT,
    "in_use": TEXT,
    "num": WHOLE,
    "bytes_per_device": WHOLE,
}
COLLECTIVE = {"component": TEXT, "phase": TEXT, "kind": TEXT, "bytes_per_device": WHOLE, "count_per_step": WHOLE}
FINDING = {"severity": TEXT}
MEMORY = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes_per_device")


def read_saved_plan(path: str) -> Mapping[str, Any]:
    """The plan in a file, with every field that a comparison reads.

    Raises InputError for a file that cannot be read, is not JSON, or is not a plan.
    """
    text = read_text(path)
    parse_json(text, path)
    plan = json.loads(text)
    _fields(path, "the plan", plan, PLAN)
    _whole_numbers(path, "'mesh'", plan.get("mesh"), ())
    _whole_numbers(path, "'memory'", plan.get("memory"), MEMORY)
    for key, fields in (("tensors", TENSOR), ("collectives", COLLECTIVE), ("findings", FINDING)):
        rows = plan.get(key)
        if not isinstance(rows, list):
            raise _no_plan(path, f"'{key}' is not a list")
        for number, row in enumerate(rows):
            _fields(path, f"'{key}' {number}", row, fields)
            if "component" in fields and row["component"] not in COMPONENTS:
                raise _no_plan(path, f"'component' of '{key}' {number} is '{row['component']}', which is no component")
            if key == "tensors" and not isinstance(row.get("at_rest"), str | None):
                raise _no_plan(path, f"'at_rest' of '{key}' {number} is not a text")
            if key == "collectives" and not _is_texts(row.get("axes")):
                raise _no_plan(path, f"'axes' of '{key}' {number} is not a list of texts")
    return plan


def _fields(path: str, where: str, value: object, fields: Mapping[str, str]) -> None:
    if not isinstance(value, dict):
        raise _no_plan(path, f"{where} is not an object")
    for name, kind in fields.items():
        if name not in value:
            raise _no_plan(path, f"{where} has no '{name}'")
        if not (isinstance(value[name], str) if kind == TEXT else _is_whole(value[name])):
            raise _no_plan(path, f"'{name}' of {where} is not {kind}")


def _whole_numbers(path: str, where: str, value: object, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise _no_plan(path, f"{where} is not an object")
    missing = [name for name in names if name not in value]
    if missing:
        raise _no_plan(path, f"{where} has no '{missing[0]}'")
    for name, number in value.items():
        if not _is_whole(number):
            raise _no_plan(path, f"'{name}' of {where} is not {WHOLE}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _no_plan(path: str, why: str) -> InputError:
    return InputError(f"{path}: this is not a plan: {why}. Write one with: shardwright plan MODEL --json > plan.json")
