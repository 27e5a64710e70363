"""The differences between two plans: tensors, collectives and bytes.

A pure function of two plans in the form of their JSON, so that it takes a plan from a file and a new one in the same way.
Axes of size 1 shard nothing: they are neither compared nor shown. The order of the others is compared, since it is the
order of the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.locks.field_changes import FieldChange
from shardwright.locks.plan_fields import plan_fields, without_size_one

Row = Mapping[str, Any]
Change = Literal["moved", "added", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One row of tensors that differs between the two sides. None: the row is missing on that side.

    ``bytes_per_device`` is of one of the ``num`` layers, as in the plan. ``gradient``: the reductions of the gradient and
    their axes. ``in_update``: None where it is as at rest. An activation has no ``at_rest``, no ``gradient``, and no ``shape``, because its shape depends on the layout.
    """

    name: str
    kind: str
    component: str
    num: int
    change: Change
    at_rest: tuple[str | None, str | None]
    in_use: tuple[str | None, str | None]
    bytes_per_device: tuple[int | None, int | None]
    shape: tuple[str | None, str | None] = (None, None)
    dtype: tuple[str | None, str | None] = (None, None)
    gradient: tuple[str | None, str | None] = (None, None)
    in_update: tuple[str | None, str | None] = (None, None)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "kind": self.kind,
            "component": self.component,
            "num": self.num,
            "change": self.change,
            "at_rest": _pair(self.at_rest),
            "in_use": _pair(self.in_use),
            **({} if self.in_update == (None, None) else {"in_update": _pair(self.in_update)}),
            "bytes_per_device": _pair(self.bytes_per_device),
            "shape": _pair(self.shape),
            "dtype": _pair(self.dtype),
            "gradient": _pair(self.gradient),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """All collectives of one component, phase, kind and axes, ragged or not: bytes of a device and executions in a step.

    ``component`` and ``phase`` are None where the compiler did not keep them.
    """

    component: str | None
    phase: str | None
    kind: str
    axes: tuple[str, ...]
    bytes_per_step: tuple[int, int]
    count_per_step: tuple[int, int]
    ragged: bool = False

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "phase": self.phase,
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes_per_step": _pair(self.bytes_per_step),
            "count_per_step": _pair(self.count_per_step),
            **({"ragged": True} if self.ragged else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What was planned on one side. ``slow``: the axes over slow links. ``errors``: number of findings of severity error."""

    model: str
    layout: str
    mesh: Mapping[str, int]
    slow: tuple[str, ...] = ()
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
class CompiledDifference:
    """The differences between two compiled programs, with their targets and the versions of what compiled them."""

    target: tuple[str, str]
    versions: tuple[Mapping[str, str], Mapping[str, str]]
    collectives: tuple[CollectiveChange, ...]
    bytes_per_step: tuple[int, int]
    memory: Mapping[str, tuple[int, int]]

    @property
    def moved(self) -> bool:
        return bool(self.collectives) or _differ(self.memory) or self.target[0] != self.target[1]

    def to_json(self) -> dict[str, object]:
        return {
            "target": _pair(self.target),
            "versions": _pair(dict(versions) for versions in self.versions),
            "collectives": [change.to_json() for change in self.collectives],
            "bytes_per_step": _pair(self.bytes_per_step),
            "memory": {part: _pair(sizes) for part, sizes in self.memory.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that differs, before and after. ``bytes_per_step``: of all collectives of one device.

    ``compiled`` is None unless both sides have a compiled program.
    """

    before: Side
    after: Side
    tensors: tuple[TensorChange, ...]
    num_unchanged: int
    collectives: tuple[CollectiveChange, ...]
    bytes_per_step: tuple[int, int]
    memory: Mapping[str, tuple[int, int]]
    compiled: CompiledDifference | None = None
    answers: tuple[Row | None, Row | None] = (None, None)
    """The answer of each side, in the form of ``Answer.to_json``; None without chips."""
    fields: tuple[FieldChange, ...] = ()
    """All other fields that differ."""
    requested: tuple[FieldChange, ...] = ()
    """Fields of the request or the declaration that differ (``REQUESTED``): alone they move nothing."""
    training_only: tuple[Sequence[Row], Sequence[Row]] = ((), ())
    """What each model says of training alone, and no engine computes."""

    @property
    def mesh_moved(self) -> bool:
        """Whether the axes larger than 1, their order, or those over slow links differ."""
        sides = [
            [(axis, size, axis in side.slow) for axis, size in side.mesh.items() if size != 1]
            for side in (self.before, self.after)
        ]
        return sides[0] != sides[1]

    @property
    def alike(self) -> bool:
        """Whether a token costs both sides the same: they plan one model, with rows of one length."""
        return (self.before.model, self.before.length) == (self.after.model, self.after.length)

    @property
    def moved(self) -> bool:
        """Whether any tensor, collective, memory size or other compared field differs."""
        compiled = self.compiled is not None and self.compiled.moved
        rows = bool(self.tensors or self.collectives or self.fields)
        return rows or self.mesh_moved or _differ(self.memory) or compiled

    @property
    def reported_fields(self) -> tuple[FieldChange, ...]:
        """The fields to report. None where tensors, collectives or the mesh differ: these explain the fields."""
        return () if self.tensors or self.collectives or self.mesh_moved else (*self.fields, *self.requested)

    def to_json(self) -> dict[str, object]:
        return {
            "moved": self.moved,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "tensors": [change.to_json() for change in self.tensors],
            "num_unchanged": self.num_unchanged,
            "collectives": [change.to_json() for change in self.collectives],
            "bytes_per_step": _pair(self.bytes_per_step),
            "memory": {part: _pair(sizes) for part, sizes in self.memory.items()},
            "answer": _pair(self.answers),
            **({} if self.compiled is None else {"compiled": self.compiled.to_json()}),
            "fields": [change.to_json() for change in self.fields],
            "said": [change.to_json() for change in self.requested],
            **({"training_only": _pair(list(rows) for rows in self.training_only)} if any(self.training_only) else {}),
        }


def difference(before: Row, after: Row) -> Difference:
    """The differences from one plan to the other. Each is in the form of ``Plan.to_json`` or of ``Lock.rows``."""
    tensors = _tensor_changes(before, after)
    first, second = (_by_kind(side["collectives"], side["mesh"]) for side in (before, after))
    collectives, compiled = _collective_changes(first, second), _compiled(before, after)
    fields, requested = plan_fields(
        before,
        after,
        moved_tensors={change.name for change in tensors},
        moved_collectives=bool(collectives),
        moved_program=compiled is not None and compiled.moved,
    )
    return Difference(
        before=_side(before),
        after=_side(after),
        tensors=tensors,
        num_unchanged=len({t["name"] for t in (*before["tensors"], *after["tensors"])} - {t.name for t in tensors}),
        collectives=collectives,
        bytes_per_step=(_total(first), _total(second)),
        memory=_memory(before["memory"], after["memory"]),
        compiled=compiled,
        answers=(before.get("answer"), after.get("answer")),
        fields=fields,
        requested=requested,
        training_only=(before.get("training_only", ()), after.get("training_only", ())),
    )


def _compiled(before: Row, after: Row) -> CompiledDifference | None:
    old, new = before.get("compiled"), after.get("compiled")
    if old is None or new is None:
        return None
    first, second = _by_kind(old["collectives"], before["mesh"]), _by_kind(new["collectives"], after["mesh"])
    return CompiledDifference(
        target=(old["target"], new["target"]),
        versions=(old["versions"], new["versions"]),
        collectives=_collective_changes(first, second),
        bytes_per_step=(_total(first), _total(second)),
        memory=_memory(old["memory"], new["memory"]),
    )


def _tensor_changes(before: Row, after: Row) -> tuple[TensorChange, ...]:
    first = {row["name"]: _compared(row, before["mesh"]) for row in before["tensors"]}
    second = {row["name"]: _compared(row, after["mesh"]) for row in after["tensors"]}
    changes = []
    for name in dict.fromkeys((*first, *second)):
        old, new = first.get(name), second.get(name)
        one = old or new
        if old == new or one is None:
            continue
        pairs = {key: (old[key] if old else None, new[key] if new else None) for key in COMPARED}
        changes.append(
            TensorChange(
                name=name,
                kind=one["kind"],
                component=one["component"],
                num=one["num"],
                change="added" if old is None else "removed" if new is None else "moved",
                **pairs,
            )
        )
    return tuple(changes)


COMPARED = ("at_rest", "in_use", "in_update", "bytes_per_device", "shape", "dtype", "gradient")


def _compared(row: Row, mesh: Mapping[str, int]) -> Row:
    at_rest, updated, shape, gradient = (row.get(name) for name in ("at_rest", "in_update", "shape", "gradient"))
    weight = row["kind"] == "weight"
    return {
        "kind": row["kind"],
        "component": row["component"],
        "num": row["num"],
        "at_rest": None if at_rest is None else without_size_one(at_rest, mesh),
        "in_use": without_size_one(row["in_use"], mesh),
        "in_update": None if updated in (None, at_rest) else without_size_one(updated, mesh),
        "bytes_per_device": row["bytes_per_device"],
        "shape": None if shape is None or not weight else "x".join(str(size) for size in shape),
        "dtype": row.get("dtype"),
        "gradient": None if gradient is None or not weight else _reductions(gradient, mesh),
    }


def _reductions(gradient: Mapping[str, str], mesh: Mapping[str, int]) -> str:
    """
    >>> _reductions({"expert": "reduce-scatter", "fsdp": "reduce-scatter"}, {"data": 1, "fsdp": 2, "expert": 4})
    'reduce-scatter fsdp/expert'
    """
    over: dict[str, list[str]] = {}
    for axis in (*mesh, *sorted(set(gradient) - set(mesh))):
        if axis in gradient and mesh.get(axis) != 1:
            over.setdefault(gradient[axis], []).append(axis)
    return ", ".join(f"{kind} {'/'.join(axes)}" for kind, axes in sorted(over.items())) or "no reduction"


Key = tuple[str | None, str | None, str, tuple[str, ...], bool]
Lines = Mapping[Key, tuple[int, int]]
"""Bytes and executions in a step, by component, phase, kind, axes, and ragged or not."""


def _by_kind(rows: Iterable[Row], mesh: Mapping[str, int]) -> Lines:
    lines: dict[Key, tuple[int, int]] = {}
    for row in rows:
        axes = tuple(axis for axis in row["axes"] if mesh.get(axis) != 1)
        key = (row.get("component"), row.get("phase"), row["kind"], axes, bool(row.get("ragged")))
        num_bytes, count = lines.get(key, (0, 0))
        times = row["count_per_step"]
        lines[key] = (num_bytes + row["bytes_per_device"] * times, count + times)
    return lines


def _collective_changes(first: Lines, second: Lines) -> tuple[CollectiveChange, ...]:
    changes = []
    for key in dict.fromkeys((*first, *second)):
        before, after = first.get(key, (0, 0)), second.get(key, (0, 0))
        if before != after:
            component, phase, kind, axes, ragged = key
            changes.append(
                CollectiveChange(
                    component=component,
                    phase=phase,
                    kind=kind,
                    axes=axes,
                    bytes_per_step=(before[0], after[0]),
                    count_per_step=(before[1], after[1]),
                    ragged=ragged,
                )
            )
    return tuple(changes)


def _total(lines: Lines) -> int:
    return sum(num_bytes for num_bytes, _ in lines.values())


def _memory(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
    return {part: (before.get(part, 0), after.get(part, 0)) for part in dict.fromkeys((*before, *after))}


def _differ(memory: Mapping[str, tuple[int, int]]) -> bool:
    return any(before != after for before, after in memory.values())


def _side(plan: Row) -> Side:
    return Side(
        model=plan["model"],
        layout=plan["layout"],
        mesh=dict(plan["mesh"]),
        slow=tuple(axis for axis, link in plan.get("links", {}).items() if link == "dcn"),
        engine=plan["engine"],
        batch=plan["batch"],
        length=plan["length"],
        errors=sum(1 for finding in plan["findings"] if finding["severity"] == "error"),
    )


def _pair(values: Iterable[object]) -> dict[str, object]:
    before, after = values
    return {"before": before, "after": after}
