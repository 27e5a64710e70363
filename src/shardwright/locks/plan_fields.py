"""Every field of two plans or locks that differs, beside the tables that ``difference`` makes of some of them.

Fields are not listed but iterated, so that a new one is compared from the day on which a plan or a lock has it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from shardwright.locks.field_changes import FieldChange, field_changes

Row = Mapping[str, Any]

TOLD = ("mesh", "memory")
"""Parts that are told whole where they differ."""

NOT_COMPARED: Mapping[str, str] = {
    "layout": "a name",
    "findings": "they follow from thresholds, which may become better; that there are errors is told",
    "step": "times follow from numbers of the hardware",
    "collectives.seconds": "times follow from numbers of the hardware",
    "choices.costs": "what a choice was made by",
    "choices.wire_bytes": "what a choice was made by",
    "compiled.versions": "of what compiled a program: they are shown beside one that moved",
}
"""What is not compared, by its place, and why. All else is, whatever it is called."""

ASKED = ("request", "choices", "groups", "roles")
"""What asks for a plan, or says in other words what its tensors show: by itself it moves nothing."""


def plan_fields(
    before: Row, after: Row, *, moved_tensors: Container[str], moved_collectives: bool, moved_program: bool
) -> tuple[tuple[FieldChange, ...], tuple[FieldChange, ...]]:
    """The fields that differ, and those of ``ASKED``. A field that one side lacks, as a lock does, is not compared;
    neither is what has been told already: tensors by name, all collectives, the compiled program."""
    told = {"collectives": moved_collectives, "compiled": moved_program}
    fields: list[FieldChange] = []
    said: list[FieldChange] = []
    for key in before:
        if key not in after or key in TOLD or key in NOT_COMPARED or told.get(key, False):
            continue
        if key == "tensors":
            sides = _common_tensors(before, after, moved_tensors)
        else:
            normal = NORMAL.get(key, _as_it_is)
            sides = normal(before[key], before["mesh"]), normal(after[key], after["mesh"])
        if None not in sides:
            (said if key in ASKED else fields).extend(field_changes(*sides, key))
    return tuple(fields), tuple(said)


def without_size_one(notation: str, mesh: Mapping[str, int]) -> str:
    """A text in the notation without the axes that cut nothing.

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
    """A row of tensors or collectives without axes of size 1, times, and names that stand twice."""
    held = {key: value for key, value in row.items() if key not in ("seconds", "asked")}
    for key in ("at_rest", "in_use"):
        if isinstance(held.get(key), str):
            held[key] = without_size_one(held[key], mesh)
    for key in ("axes", "shard_group", "replica_group"):
        if key in held:
            held[key] = _larger(held[key], mesh)
    if "gradient" in held:
        held["gradient"] = {axis: how for axis, how in held["gradient"].items() if mesh.get(axis) != 1}
    if "tensors" in held:
        held["tensors"] = list(dict.fromkeys(held["tensors"]))
    return {**held, "ragged": bool(held.get("ragged"))}


def _rows(rows: Sequence[Row], mesh: Mapping[str, int]) -> list[Row]:
    return [_row(row, mesh) for row in rows]


def _compiled(part: Row | None, mesh: Mapping[str, int]) -> Row | None:
    if part is None:
        return None
    held = {key: value for key, value in part.items() if key != "versions"}
    return {**held, "collectives": _rows(part["collectives"], mesh)}


def _slow(links: Mapping[str, str], mesh: Mapping[str, int]) -> Row:
    """An axis that crosses fast links is as one of which nobody said so."""
    return {axis: link for axis, link in links.items() if link != "ici" and mesh.get(axis) != 1}


def _chosen(choices: Sequence[Row], mesh: Mapping[str, int]) -> list[Row]:
    del mesh
    return [{key: value for key, value in row.items() if f"choices.{key}" not in NOT_COMPARED} for row in choices]


def _groups(groups: Mapping[str, Sequence[str]], mesh: Mapping[str, int]) -> Row:
    return {name: _larger(axes, mesh) for name, axes in groups.items()}


def _roles(roles: Row, mesh: Mapping[str, int]) -> Row:
    return {axis: entry for axis, entry in roles.items() if mesh.get(axis) != 1}


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
}
"""How a part is brought to one form on both sides: what an axis of size 1 does is nothing."""
