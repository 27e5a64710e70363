"""The type of every field of a plan in a file, as ``plan --json`` or ``lock`` write it, as data.

One function checks them all (``check_fields``). A field that a comparison does not need may be missing, so that a file
of an older version can be compared. A field that is present must have its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from shardwright.core.findings.bounds import is_integer, is_number
from shardwright.core.findings.codes import SEVERITIES
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.mesh.mesh import LINKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a value may be. ``items``: the kind of its items, for a list or an object of one kind."""

    name: str
    holds: Callable[[Any], bool]
    items: Kind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """``needed``: the field must be present. ``null``: it may be null."""

    kind: Kind
    needed: bool = True
    null: bool = False


Fields = Mapping[str, Field]


def one_of(words: tuple[str, ...]) -> Kind:
    """A string that is one of ``words``."""
    return Kind(name=f"one of {', '.join(words)}", holds=lambda value: isinstance(value, str) and value in words)


def list_of(kind: Kind, name: str) -> Kind:
    return Kind(name=name, holds=lambda value: isinstance(value, list) and all(map(kind.holds, value)))


def object_of(kind: Kind) -> Kind:
    """An object with any keys, whose values are of one kind."""
    return Kind(name="an object", holds=lambda value: isinstance(value, dict), items=kind)


def needed(kind: Kind) -> Field:
    return Field(kind=kind)


def maybe(kind: Kind) -> Field:
    """A field that may be missing."""
    return Field(kind=kind, needed=False)


def or_null(kind: Kind) -> Field:
    """A field that may be missing or null."""
    return Field(kind=kind, needed=False, null=True)


TEXT = Kind(name="a text", holds=lambda value: isinstance(value, str))
WHOLE = Kind(name="a whole number", holds=is_integer)
SIZE = Kind(name="a whole number or 'auto'", holds=lambda value: value == "auto" or is_integer(value))
NUMBER = Kind(name="a number", holds=lambda value: is_number(value) and isfinite(value))
FLAG = Kind(name="true or false", holds=lambda value: isinstance(value, bool))
OBJECT = Kind(name="an object", holds=lambda value: isinstance(value, dict))
ANYTHING = Kind(name="a value", holds=lambda _: True)
TEXTS = list_of(TEXT, "a list of texts")
WHOLES = list_of(WHOLE, "a list of whole numbers")

PLAN: Fields = {
    "model": needed(TEXT),
    "layout": needed(TEXT),
    "engine": needed(TEXT),
    "batch": needed(WHOLE),
    "length": needed(WHOLE),
    "mesh": needed(object_of(WHOLE)),
    "links": maybe(object_of(one_of(LINKS))),
    "load_balanced": maybe(FLAG),
    "dtype": maybe(TEXT),
    "optimizer": maybe(TEXT),
    "master_dtype": maybe(TEXT),
    "gradients_dtype": maybe(TEXT),
    "loss_chunks": maybe(WHOLE),
    "average": maybe(NUMBER),
    "precision": maybe(OBJECT),
    "pipeline": maybe(OBJECT),
    "num_parameters": maybe(WHOLE),
    "groups": maybe(object_of(TEXTS)),
    "roles": maybe(object_of(object_of(TEXT))),
    "answer": or_null(OBJECT),
    "step": or_null(OBJECT),
}
ANSWER: Fields = {
    "fits": or_null(FLAG),
    "needed_bytes": needed(WHOLE),
    "usable_bytes": or_null(WHOLE),
    "step_s": maybe(NUMBER),
    "low_step_s": or_null(NUMBER),
    "high_step_s": or_null(NUMBER),
    "tokens_per_s": maybe(NUMBER),
    "tokens_per_s_per_device": maybe(NUMBER),
    "model_tflops_per_s_per_device": maybe(NUMBER),
    "hardware_tflops_per_s_per_device": or_null(NUMBER),
    "mfu": or_null(NUMBER),
    "exposed_share": maybe(NUMBER),
    "waiting": or_null(OBJECT),
    "training": maybe(OBJECT),
}
TRAINING: Fields = {
    "tokens": needed(WHOLE),
    "days": needed(NUMBER),
    "device_hours": needed(NUMBER),
    "price": maybe(NUMBER),
    "cost": maybe(NUMBER),
}
PRECISION: Fields = {"recipe": needed(TEXT), "options": maybe(OBJECT), "free": maybe(FLAG)}
PIPELINE: Fields = {
    "axes": needed(TEXTS),
    "ranks": needed(WHOLE),
    "virtual": needed(WHOLE),
    "schedule": needed(TEXT),
    "placement": needed(TEXT),
    "stages_text": needed(TEXT),
}
PRECISION_ROW: Fields = {"product": needed(TEXT), "operand": needed(TEXT)}
PRECISION_WEIGHT: Fields = {"name": needed(TEXT), "num": maybe(WHOLE)}
MEMORY = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "total_bytes_per_device")
TENSOR: Fields = {
    "name": needed(TEXT),
    "kind": needed(TEXT),
    "component": needed(TEXT),
    "shape": maybe(WHOLES),
    "unpadded_shape": maybe(WHOLES),
    "dtype": maybe(TEXT),
    "at_rest": or_null(TEXT),
    "in_use": needed(TEXT),
    "in_update": maybe(TEXT),
    "num": needed(WHOLE),
    "bytes_per_device": needed(WHOLE),
    "shard_group": maybe(TEXTS),
    "replica_group": maybe(TEXTS),
    "gradient": maybe(object_of(TEXT)),
}
COLLECTIVE: Fields = {
    "component": needed(TEXT),
    "phase": needed(TEXT),
    "kind": needed(TEXT),
    "axes": needed(TEXTS),
    "bytes_per_device": needed(WHOLE),
    "count_per_step": needed(WHOLE),
    "seconds": or_null(NUMBER),
    "tensors": maybe(TEXTS),
    "ragged": maybe(FLAG),
    "group_size": maybe(WHOLE),
    "dtype": maybe(TEXT),
    "at_once": maybe(WHOLE),
    "compiled_as": maybe(TEXT),
}
CHOICE: Fields = {
    "what": needed(TEXT),
    "chosen": needed(TEXT),
    "costs": maybe(object_of(NUMBER)),
    "wire_bytes": maybe(object_of(WHOLE)),
}
TRAINING_ONLY: Fields = {"key": needed(TEXT), "value": needed(TEXT), "part": needed(TEXT)}
FINDING: Fields = {"severity": needed(one_of(SEVERITIES)), "code": maybe(TEXT), "where": maybe(TEXT)}
COMPILED: Fields = {"target": needed(TEXT), "versions": needed(object_of(TEXT))}
COMPILED_MEMORY = ("arguments_bytes", "temporaries_bytes", "output_bytes", "aliased_bytes", "peak_bytes")
COMPILED_COLLECTIVE: Fields = {
    "component": or_null(TEXT),
    "phase": or_null(TEXT),
    "kind": needed(TEXT),
    "axes": needed(TEXTS),
    "bytes_per_device": needed(WHOLE),
    "count_per_step": needed(WHOLE),
    "dtypes": maybe(TEXTS),
    "in_loop": maybe(FLAG),
    "ragged": maybe(FLAG),
}


class NotSavedError(ValueError):
    """Why a value is not what was expected, as half a sentence: "'mesh' is not an object"."""

    def within(self, source: str, what: str, how: str) -> InputError:
        """As an error about a file. ``what``: a plan or a lock. ``how``: how to write one."""
        return InputError(f"{source}: this is not {what}: {self}. {how}")


def check_plan(plan: object, *, findings: bool = True) -> Mapping[str, Any]:
    """The value, if every field of a plan has its type and no tensor is repeated. Raises NotSavedError."""
    found = check_fields("the plan", plan, PLAN)
    check_object("'memory'", found.get("memory"), object_of(WHOLE), MEMORY)
    seen: dict[str, int] = {}
    for number, row in enumerate(check_rows(found, "tensors", TENSOR)):
        _check_component(f"'tensors' {number}", row["component"])
        first = seen.setdefault(row["name"], number)
        if first != number:
            raise NotSavedError(f"'tensors' {number} is '{row['name']}', which 'tensors' {first} is already")
    for number, row in enumerate(check_rows(found, "collectives", COLLECTIVE)):
        _check_component(f"'collectives' {number}", row["component"])
    for key, fields in (("choices", CHOICE), ("training_only", TRAINING_ONLY)):
        if key in found:
            check_rows(found, key, fields)
    if "precision" in found:
        _check_precision(found["precision"])
    if "pipeline" in found:
        check_fields("'pipeline'", found["pipeline"], PIPELINE)
    if found.get("answer") is not None:
        answer = check_fields("'answer'", found["answer"], ANSWER)
        if "training" in answer:
            check_fields("'training' of 'answer'", answer["training"], TRAINING)
    if findings:
        check_rows(found, "findings", FINDING)
    return found


def _check_precision(value: object) -> None:
    of = " of 'precision'"
    found = check_fields("'precision'", value, PRECISION)
    check_rows(found, "operands", PRECISION_ROW, of)
    for number, row in enumerate(check_rows(found, "weights", PRECISION_WEIGHT, of)):
        try:
            check_rows(row, "operands", PRECISION_ROW)
        except NotSavedError as why:
            raise NotSavedError(f"{why} in 'weights' {number}{of}") from None


def check_compiled(compiled: object) -> Mapping[str, Any]:
    """The value, if it is the compiled program of a lock. Raises NotSavedError."""
    found = check_fields("'compiled'", compiled, COMPILED)
    check_object("'memory' of 'compiled'", found.get("memory"), object_of(WHOLE), COMPILED_MEMORY)
    for number, row in enumerate(check_rows(found, "collectives", COMPILED_COLLECTIVE, " of 'compiled'")):
        if row.get("component") is not None:
            _check_component(f"'collectives' {number} of 'compiled'", row["component"])
    return found


def check_fields(where: str, value: object, fields: Fields) -> Mapping[str, Any]:
    """The value, if it is an object with these fields, each of its kind. Raises NotSavedError."""
    if not isinstance(value, dict):
        raise NotSavedError(f"{where} is not an object")
    of = "" if where == "the plan" else f" of {where}"
    for name, field in fields.items():
        if name not in value:
            if field.needed and field.kind.items is None:
                raise NotSavedError(f"{where} has no '{name}'")
            if field.needed:
                check_object(f"'{name}'{of}", None, field.kind)
        elif value[name] is not None or not field.null:
            check_object(f"'{name}'{of}" if field.kind.items else f"'{name}' of {where}", value[name], field.kind)
    return value


def check_object(where: str, value: object, kind: Kind, names: tuple[str, ...] = ()) -> Any:
    """The value, if it and its items are of their kinds and it has these names, among others. Raises NotSavedError."""
    if not kind.holds(value):
        raise NotSavedError(f"{where} is {'neither true nor false' if kind is FLAG else f'not {kind.name}'}")
    if kind.items is not None:
        assert isinstance(value, dict)
        for name in names:
            if name not in value:
                raise NotSavedError(f"{where} has no '{name}'")
        for name, item in value.items():
            check_object(f"'{name}' of {where}", item, kind.items)
    return value


def check_rows(value: Mapping[str, Any], key: str, fields: Fields, of: str = "") -> list[Mapping[str, Any]]:
    """The list of objects under a key, each with these fields. Raises NotSavedError."""
    rows = value.get(key)
    if not isinstance(rows, list):
        raise NotSavedError(f"'{key}' is not a list")
    return [check_fields(f"'{key}' {number}{of}", row, fields) for number, row in enumerate(rows)]


def _check_component(where: str, component: str) -> None:
    if component not in COMPONENTS:
        raise NotSavedError(f"'component' of {where} is '{component}', which is no component")
