"""A plan that was written to a file, as ``plan --json`` or ``lock`` write it: what must be there, and of which kind.

Fields that a comparison does not read are not asked for, so that a file of an older version can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from shardwright.core.errors import InputError
from shardwright.core.roles import COMPONENTS

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
COMPILED_COLLECTIVE = {"kind": TEXT, "bytes_per_device": WHOLE, "count_per_step": WHOLE}
FINDING = {"severity": TEXT}
MEMORY = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes_per_device")
COMPILED_MEMORY = ("arguments_bytes", "temporaries_bytes", "output_bytes", "aliased_bytes", "peak_bytes")


class NotSavedError(ValueError):
    """What a value lacks to be what was expected, as half a sentence: "'mesh' is not an object"."""

    def within(self, source: str, what: str, how: str) -> InputError:
        """As an error about a file. ``what``: a plan, a lock. ``how``: to write one."""
        return InputError(f"{source}: this is not {what}: {self}. {how}")


def check_plan(plan: object, *, findings: bool = True) -> Mapping[str, Any]:
    """The value, which has every field of a plan that a comparison reads. Raises NotSavedError."""
    found = check_fields("the plan", plan, PLAN)
    check_whole_numbers("'mesh'", found.get("mesh"))
    check_texts("'links'", found.get("links", {}))
    check_whole_numbers("'memory'", found.get("memory"), MEMORY)
    for number, row in enumerate(check_rows(found, "tensors", TENSOR)):
        _check_component(f"'tensors' {number}", row["component"])
        if not isinstance(row.get("at_rest"), str | None):
            raise NotSavedError(f"'at_rest' of 'tensors' {number} is not a text")
        if not isinstance(row.get("gradient", {}), dict):
            raise NotSavedError(f"'gradient' of 'tensors' {number} is not an object")
    for number, row in enumerate(check_rows(found, "collectives", COLLECTIVE)):
        _check_component(f"'collectives' {number}", row["component"])
        _check_axes(f"'collectives' {number}", row)
    if findings:
        check_rows(found, "findings", FINDING)
    return found


def check_compiled(compiled: object) -> Mapping[str, Any]:
    """The value, which is the compiled part of a lock. Raises NotSavedError."""
    found = check_fields("'compiled'", compiled, {"target": TEXT})
    check_texts("'versions' of 'compiled'", found.get("versions"))
    check_whole_numbers("'memory' of 'compiled'", found.get("memory"), COMPILED_MEMORY)
    for number, row in enumerate(check_rows(found, "collectives", COMPILED_COLLECTIVE)):
        where = f"'collectives' {number} of 'compiled'"
        for name in ("component", "phase"):
            if not isinstance(row.get(name), str | None):
                raise NotSavedError(f"'{name}' of {where} is not a text")
        if row.get("component") is not None:
            _check_component(where, row["component"])
        _check_axes(where, row)
    return found


def check_fields(where: str, value: object, fields: Mapping[str, str]) -> Mapping[str, Any]:
    """The value, which is an object with these fields, each of its kind. Raises NotSavedError."""
    if not isinstance(value, dict):
        raise NotSavedError(f"{where} is not an object")
    for name, kind in fields.items():
        if name not in value:
            raise NotSavedError(f"{where} has no '{name}'")
        if not (isinstance(value[name], str) if kind == TEXT else is_whole(value[name])):
            raise NotSavedError(f"'{name}' of {where} is not {kind}")
    return value


def check_rows(value: Mapping[str, Any], key: str, fields: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The list of objects under a key, each with these fields. Raises NotSavedError."""
    rows = value.get(key)
    if not isinstance(rows, list):
        raise NotSavedError(f"'{key}' is not a list")
    return [check_fields(f"'{key}' {number}", row, fields) for number, row in enumerate(rows)]


def check_whole_numbers(where: str, value: object, needed: tuple[str, ...] = ()) -> Mapping[str, int]:
    """The value, which is an object of whole numbers, with these names among others. Raises NotSavedError."""
    found = check_fields(where, value, dict.fromkeys(needed, WHOLE))
    return check_fields(where, value, dict.fromkeys(found, WHOLE))


def check_texts(where: str, value: object) -> Mapping[str, str]:
    """The value, which is an object of texts. Raises NotSavedError."""
    return check_fields(where, value, dict.fromkeys(check_fields(where, value, {}), TEXT))


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_component(where: str, component: str) -> None:
    if component not in COMPONENTS:
        raise NotSavedError(f"'component' of {where} is '{component}', which is no component")


def _check_axes(where: str, row: Mapping[str, Any]) -> None:
    if not is_texts(row.get("axes")):
        raise NotSavedError(f"'axes' of {where} is not a list of texts")
