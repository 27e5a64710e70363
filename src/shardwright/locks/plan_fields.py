"""Every field that differs between two plans or locks, in addition to the tables of ``difference``.

The code iterates over the fields and lists none, so a field that is new in a plan or a lock is compared at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from shardwright.core.layout.auto import LAYOUT
from shardwright.locks.field_changes import FieldChange, field_changes

Row = Mapping[str, Any]

REPORTED_IN_FULL = ("mesh", "memory")
"""Fields that a difference reports in full."""

NOT_COMPARED: Mapping[str, str] = {
    "layout": "a name",
    "findings": "they follow from thresholds, which may be corrected; the number of errors is reported",
    "answer": "times follow from numbers of the hardware; the answers of both sides are shown",
    "training_only": "what no engine computes, and no placement: it is shown",
    "step": "times follow from numbers of the hardware",
    "collectives.seconds": "times follow from numbers of the hardware",
    "choices.costs": "the costs by which `auto` chose",
    "choices.wire_bytes": "the costs by which `auto` chose",
    "compiled.versions": "versions of what compiled a program: they are shown with a program that moved",
}
"""The fields that are not compared, by their place, and why. All others are compared, whatever their name."""

REQUESTED = ("request", "choices", "groups", "roles")
"""Fields that request a plan, or repeat in another form what its tensors show: alone they move nothing."""


DECIDED = ("axes", "ranks", "virtual", "schedule", "placement", "stages_text")
"""The fields of a pipeline that a lock holds."""

SPECS = ("at_rest", "in_use", "in_update")
"""The fields of a tensor that are specs."""

NONE_IF_ABSENT = ("master_dtype", "gradients_dtype", "loss_chunks", "precision", "pipeline")
"""Fields that a plan without them does not have: one that only one side has differs."""


def plan_fields(
    before: Row, after: Row, *, moved_tensors: Container[str], moved_collectives: bool, moved_program: bool
) -> tuple[tuple[FieldChange, ...], tuple[FieldChange, ...]]:
    """The fields that differ, and those of ``REQUESTED`` that differ.

    Not compared: a field that one side lacks, as a lock may; and what is reported already, which is the tensors in
    ``moved_tensors``, and the collectives and the compiled program where they moved.
    """
    reported = {"collectives": moved_collectives, "compiled": moved_program}
    fields: list[FieldChange] = []
    requested: list[FieldChange] = []
    before, after = ({**dict.fromkeys(NONE_IF_ABSENT), **side} for side in (before, after))
    for key in before:
        if key not in after or key in REPORTED_IN_FULL or key in NOT_COMPARED or reported.get(key, False):
            continue
        if key == "tensors":
            sides = _common_tensors(before, after, moved_tensors)
        else:
            normal = NORMAL.get(key, _as_it_is)
            sides = normal(before[key], before["mesh"]), normal(after[key], after["mesh"])
        if None not in sides:
            (requested if key in REQUESTED else fields).extend(field_changes(*sides, key))
    return tuple(fields), tuple(requested)


def without_size_one(notation: str, mesh: Mapping[str, int]) -> str:
    """A spec in the notation without the axes of size 1, which shard nothing.

    >>> without_size_one("batch/data/fsdp length/expert embed", {"data": 1, "fsdp": 2, "expert": 4})
    'batch/fsdp length/expert embed'
    """
    words = (word.split("/") for word in notation.split())
    return " ".join("/".join((name, *_larger(axes, mesh))) for name, *axes in words)


def _larger(axes: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
    return [axis for axis in axes if mesh.get(axis) != 1]


def _common_tensors(before: Row, after: Row, moved: Container[str]) -> tuple[Row, Row]:
    """The rows of tensors that both sides have, by name, with the fields that both have."""
    first, second = ({row["name"]: row for row in side["tensors"]} for side in (before, after))
    pairs = {name: (row, second[name]) for name, row in first.items() if name in second and name not in moved}
    sides: tuple[dict[str, Row], dict[str, Row]] = ({}, {})
    for name, pair in pairs.items():
        for number, side in enumerate((before, after)):
            common = {key: value for key, value in pair[number].items() if key in pair[1 - number]}
            sides[number][name] = _row(common, side["mesh"])
    return sides


def _row(row: Row, mesh: Mapping[str, int]) -> dict[str, Any]:
    """A row of tensors or collectives without axes of size 1, times and repeated names."""
    compared = {key: value for key, value in row.items() if key not in ("seconds", "asked")}
    for key in SPECS:
        if isinstance(compared.get(key), str):
            compared[key] = without_size_one(compared[key], mesh)
    for key in ("axes", "shard_group", "replica_group"):
        if key in compared:
            compared[key] = _larger(compared[key], mesh)
    if "gradient" in compared:
        compared["gradient"] = {axis: how for axis, how in compared["gradient"].items() if mesh.get(axis) != 1}
    if "tensors" in compared:
        compared["tensors"] = list(dict.fromkeys(compared["tensors"]))
    return {**compared, "ragged": bool(compared.get("ragged"))}


def _rows(rows: Sequence[Row], mesh: Mapping[str, int]) -> list[Row]:
    return [_row(row, mesh) for row in rows]


def _compiled(program: Row | None, mesh: Mapping[str, int]) -> Row | None:
    if program is None:
        return None
    compared = {key: value for key, value in program.items() if key != "versions"}
    return {**compared, "collectives": _rows(program["collectives"], mesh)}


def _slow(links: Mapping[str, str], mesh: Mapping[str, int]) -> Row:
    """The axes over slow links. An axis without a stated link counts as fast."""
    return {axis: link for axis, link in links.items() if link != "ici" and mesh.get(axis) != 1}


def _chosen(choices: Sequence[Row], mesh: Mapping[str, int]) -> list[Row]:
    """What was chosen of the plan. Its layout and its mesh are compared as they are, whoever chose them."""
    del mesh
    return [
        {key: value for key, value in row.items() if f"choices.{key}" not in NOT_COMPARED}
        for row in choices
        if row.get("what") != LAYOUT
    ]


def _groups(groups: Mapping[str, Sequence[str]], mesh: Mapping[str, int]) -> Row:
    return {name: _larger(axes, mesh) for name, axes in groups.items()}


def _roles(roles: Row, mesh: Mapping[str, int]) -> Row:
    return {axis: entry for axis, entry in roles.items() if mesh.get(axis) != 1}


def _precision(precision: Row | None, mesh: Mapping[str, int]) -> Row | str:
    """The recipe with a line for each operand, and what each weight has of it."""
    del mesh
    if precision is None:
        return "none"
    operands = {
        f"{row['product']}.{row['operand']}": ", ".join(
            f"{name} {value}" for name, value in row.items() if name not in ("product", "operand")
        )
        for row in precision["operands"]
    }
    weights = [
        {
            **{key: value for key, value in row.items() if key != "operands"},
            "operands": {
                f"{one['product']}.{one['operand']}": {
                    key: value for key, value in one.items() if key not in ("product", "operand")
                }
                for one in row["operands"]
            },
        }
        for row in precision["weights"]
    ]
    return {**precision, "operands": operands, "weights": weights}


def _pipeline(pipeline: Row | None, mesh: Mapping[str, int]) -> Row | str:
    """What is decided about a pipeline. Its bytes are in the memory and the collectives."""
    del mesh
    return "none" if pipeline is None else {name: pipeline[name] for name in DECIDED if name in pipeline}


def _or_none(dtype: str | None, mesh: Mapping[str, int]) -> str:
    del mesh
    return dtype or "none"


def _or_one(number: int | None, mesh: Mapping[str, int]) -> int:
    del mesh
    return 1 if number is None else number


def _as_it_is(value: Any, mesh: Mapping[str, int]) -> Any:
    del mesh
    return value


NORMAL: Mapping[str, Callable[[Any, Mapping[str, int]], Any]] = {
    "collectives": _rows,
    "compiled": _compiled,
    "links": _slow,
    "choices": _chosen,
    "groups": _groups,
    "roles": _roles,
    "master_dtype": _or_none,
    "gradients_dtype": _or_none,
    "loss_chunks": _or_one,
    "precision": _precision,
    "pipeline": _pipeline,
}
"""How a field is normalised on both sides: without axes of size 1."""
