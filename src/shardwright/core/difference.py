"""What moves between two plans: tensor by tensor, collective by collective, byte by byte.

A pure function of two plans in the form of their JSON, so that a plan from a file and one just made are the same.
Axes of size 1 cut nothing and are left out of what is compared and shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
Change = Literal["moved", "added", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One row of tensors that is not the same on both sides. None: not there on that side.

    ``bytes_per_device`` is of one of the ``num`` layers, as in the plan. An activation has no ``at_rest``.
    """

    name: str
    kind: str
    component: str
    num: int
    change: Change
    at_rest: tuple[str | None, str | None]
    in_use: tuple[str | None, str | None]
    bytes_per_device: tuple[int | None, int | None]

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "kind": self.kind,
            "component": self.component,
            "num": self.num,
            "change": self.change,
            "at_rest": _pair(self.at_rest),
            "in_use": _pair(self.in_use),
            "bytes_per_device": _pair(self.bytes_per_device),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """All collectives of one component, phase, kind and axes: bytes on a device and executions in a step."""

    component: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes_per_step: tuple[int, int]
    count_per_step: tuple[int, int]

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "phase": self.phase,
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes_per_step": _pair(self.bytes_per_step),
            "count_per_step": _pair(self.count_per_step),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What was planned on one side. ``errors``: findings of severity error."""

    model: str
    layout: str
    mesh: Mapping[str, int]
    engine: str
    batch: int
    length: int
    errors: int

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "layout": self.layout,
            "mesh": dict(self.mesh),
            "engine": self.engine,
            "batch": self.batch,
            "length": self.length,
            "errors": self.errors,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that differs, before and after. ``bytes_per_step``: of all collectives, on one device."""

    before: Side
    after: Side
    tensors: tuple[TensorChange, ...]
    num_unchanged: int
    collectives: tuple[CollectiveChange, ...]
    bytes_per_step: tuple[int, int]
    memory: Mapping[str, tuple[int, int]]

    def to_json(self) -> dict[str, object]:
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "tensors": [change.to_json() for change in self.tensors],
            "num_unchanged": self.num_unchanged,
            "collectives": [change.to_json() for change in self.collectives],
            "bytes_per_step": _pair(self.bytes_per_step),
            "memory": {part: _pair(sizes) for part, sizes in self.memory.items()},
        }


def difference(before: Row, after: Row) -> Difference:
    """What moves from one plan to the other, each in the form of ``Plan.to_json``."""
    tensors = _tensor_changes(before, after)
    first, second = _by_kind(before), _by_kind(after)
    collectives = tuple(
        CollectiveChange(
            component=key[0],
            phase=key[1],
            kind=key[2],
            axes=key[3],
            bytes_per_step=(first.get(key, (0, 0))[0], second.get(key, (0, 0))[0]),
            count_per_step=(first.get(key, (0, 0))[1], second.get(key, (0, 0))[1]),
        )
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    )
    return Difference(
        before=_side(before),
        after=_side(after),
        tensors=tensors,
        num_unchanged=len({t["name"] for t in (*before["tensors"], *after["tensors"])} - {t.name for t in tensors}),
        collectives=collectives,
        bytes_per_step=(sum(line[0] for line in first.values()), sum(line[0] for line in second.values())),
        memory={part: (before["memory"][part], after["memory"][part]) for part in before["memory"]},
    )


def without_size_one(notation: str, mesh: Mapping[str, int]) -> str:
    """A text in the notation without the axes that cut nothing.

    >>> without_size_one("batch/data/fsdp length/expert embed", {"data": 1, "fsdp": 2, "expert": 4})
    'batch/fsdp length/expert embed'
    """
    words = (word.split("/") for word in notation.split())
    return " ".join("/".join((name, *(axis for axis in axes if mesh.get(axis) != 1))) for name, *axes in words)


def _tensor_changes(before: Row, after: Row) -> tuple[TensorChange, ...]:
    first = {row["name"]: _compared(row, before["mesh"]) for row in before["tensors"]}
    second = {row["name"]: _compared(row, after["mesh"]) for row in after["tensors"]}
    changes = []
    for name in dict.fromkeys((*first, *second)):
        old, new = first.get(name), second.get(name)
        one = old or new
        if old == new or one is None:
            continue
        changes.append(
            TensorChange(
                name=name,
                kind=one["kind"],
                component=one["component"],
                num=one["num"],
                change="added" if old is None else "removed" if new is None else "moved",
                at_rest=(old["at_rest"] if old else None, new["at_rest"] if new else None),
                in_use=(old["in_use"] if old else None, new["in_use"] if new else None),
                bytes_per_device=(
                    old["bytes_per_device"] if old else None,
                    new["bytes_per_device"] if new else None,
                ),
            )
        )
    return tuple(changes)


def _compared(row: Row, mesh: Mapping[str, int]) -> Row:
    at_rest = row.get("at_rest")
    return {
        "kind": row["kind"],
        "component": row["component"],
        "num": row["num"],
        "at_rest": None if at_rest is None else without_size_one(at_rest, mesh),
        "in_use": without_size_one(row["in_use"], mesh),
        "bytes_per_device": row["bytes_per_device"],
    }


def _by_kind(plan: Row) -> dict[tuple[str, str, str, tuple[str, ...]], tuple[int, int]]:
    """Bytes and executions in a step by component, phase, kind and axes."""
    lines: dict[tuple[str, str, str, tuple[str, ...]], tuple[int, int]] = {}
    for row in plan["collectives"]:
        axes = tuple(axis for axis in row["axes"] if plan["mesh"].get(axis) != 1)
        key = (row["component"], row["phase"], row["kind"], axes)
        num_bytes, count = lines.get(key, (0, 0))
        times = row["count_per_step"]
        lines[key] = (num_bytes + row["bytes_per_device"] * times, count + times)
    return lines


def _side(plan: Row) -> Side:
    return Side(
        model=plan["model"],
        layout=plan["layout"],
        mesh=dict(plan["mesh"]),
        engine=plan["engine"],
        batch=plan["batch"],
        length=plan["length"],
        errors=sum(1 for finding in plan["findings"] if finding["severity"] == "error"),
    )


def _pair(values: Iterable[object]) -> dict[str, object]:
    before, after = values
    return {"before": before, "after": after}
