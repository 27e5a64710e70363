"""A lock: a request and its plan, in a file that is committed.

It holds everything that is needed to plan again, and what is compared then: every tensor, every collective, memory,
and, where a target was compiled, the compiled program. With chips it also holds the plan's answer (``core/estimate/answer.py``), so that a review shows
what a change costs; that is not compared, and neither times of collectives nor findings are held: they follow from numbers of the hardware
and from thresholds, which may be corrected without any change of placement.

The text has one line for each tensor, collective, axis and option, in a fixed order, and the specs of tensors leave out
axes of size 1. So `git diff` of two locks lists what moved.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.core.findings.bounds import is_integer
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.declaration import MOVED, declaration
from shardwright.core.layout.layout import Layout
from shardwright.core.plan.plan import Plan
from shardwright.locks.difference import Difference, difference
from shardwright.locks.lock_request import LockRequest
from shardwright.locks.plan_fields import DECIDED, SPECS, without_size_one
from shardwright.locks.saved_plan import (
    ANYTHING,
    CHOICE,
    COLLECTIVE,
    COMPILED_COLLECTIVE,
    COMPILED_MEMORY,
    TENSOR,
    TEXT,
    TEXTS,
    TRAINING_ONLY,
    Fields,
    NotSavedError,
    check_compiled,
    check_fields,
    check_plan,
    maybe,
    needed,
    object_of,
)

FORMAT = 1
"""Incremented whenever an older shardwright could misread a new lock, or a newer one an old lock."""

MARK = "shardwright_lock"
"""The first key of a lock, whose value is its format."""

HOW = "Write one with: shardwright lock MODEL --layout NAME|FILE --out FILE"

HELD = ("model", "layout", "mesh", "links", "engine", "batch", "length", "dtype", "load_balanced", "num_parameters")
"""The fields of a plan that a lock holds in addition to its lists, by their names in the plan."""

HELD_IF_SET = ("optimizer", "master_dtype", "gradients_dtype", "average", "loss_chunks", "precision", "pipeline")
"""Those of its fields that a plan has only where they are not the default."""

ANSWER = "answer"
"""The plan's answer, to ``ANSWER_DIGITS``: not compared."""

ANSWER_DIGITS = 6

ONE_A_LINE = (
    ("request",),
    ("declaration",),
    ("declaration", "mesh"),
    ("declaration", "roles"),
    ("declaration", "rules"),
    ("training_only",),
    ("tensors",),
    ("collectives",),
    ("memory",),
    ("compiled",),
    ("compiled", "collectives"),
    ("compiled", "memory"),
)
"""The places where each item has a line of its own. Everything below an item is on its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """``plan``: in the form of ``Plan.to_json``, without the fields that a lock leaves out. ``compiled``: see ``compiled_program``."""

    request: LockRequest
    declared: Mapping[str, Any]
    plan: Mapping[str, Any]
    compiled: Mapping[str, Any] | None = None

    @property
    def rows(self) -> Mapping[str, Any]:
        """What ``difference`` compares. A lock is only written for a plan without errors."""
        # An older lock has no 'choices': a plan in which `auto` chose something must differ from it.
        plan = {"choices": [], **self.plan}
        return {**plan, "findings": [], "compiled": self.compiled, "request": self.request.to_json()}

    def to_json(self) -> dict[str, Any]:
        return {
            MARK: FORMAT,
            **{key: self.plan[key] for key in (*HELD, *HELD_IF_SET, ANSWER) if key in self.plan},
            "request": self.request.to_json(),
            "declaration": dict(self.declared),
            "choices": list(self.plan.get("choices", ())),
            **({"training_only": list(self.plan["training_only"])} if "training_only" in self.plan else {}),
            "tensors": list(self.plan["tensors"]),
            "collectives": list(self.plan["collectives"]),
            "memory": dict(self.plan["memory"]),
            **({} if self.compiled is None else {"compiled": dict(self.compiled)}),
        }

    def text(self) -> str:
        """The text of the file."""
        return "\n".join(_lines(self.to_json())) + "\n"


def lock_of(request: LockRequest, layout: Layout, plan: Plan, compiled: Mapping[str, Any] | None = None) -> Lock:
    """The lock of a plan. ``layout``: as declared, with `auto` where the plan has what `auto` chose."""
    # In the form in which it would be read again, so that a plan and its lock are compared in one form.
    rows = json.loads(json.dumps(plan.to_json()))
    # A file may take from a model with experts what the model by its name lacks: then none is said too.
    training = rows.get("training_only", [])
    says_training = bool(training) or plan.request.table.top_k is not None
    return Lock(
        request=request,
        declared=json.loads(json.dumps(declaration(layout))),
        plan={
            **{key: rows[key] for key in (*HELD, *(key for key in HELD_IF_SET if key in rows))},
            **({"pipeline": {name: rows["pipeline"][name] for name in DECIDED}} if "pipeline" in rows else {}),
            **({} if rows["answer"] is None else {"answer": _rounded(rows["answer"])}),
            "choices": [{"what": row["what"], "chosen": row["chosen"]} for row in rows["choices"]],
            **({"training_only": training} if says_training else {}),
            "tensors": [_locked_tensor(row, rows["mesh"]) for row in rows["tensors"]],
            "collectives": [_locked_collective(row, rows["mesh"]) for row in rows["collectives"]],
            "memory": rows["memory"],
        },
        compiled=compiled,
    )


def compiled_program(target: str, program: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """What a lock holds of a compiled program, which is given in the form of ``CompiledProgram.to_json``.

    ``versions``: of the packages that compiled it, by name. Rows that differ only in fields that a lock leaves out (the
    source line, the instructions) become one row. The order of the rows does not depend on the program's text.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in program["collectives"]:
        ragged = bool(row.get("ragged"))
        dtypes = sorted(row["dtypes"])
        locked = {
            "component": row["component"],
            "phase": row["phase"],
            "kind": row["kind"],
            "axes": list(row["axes"]),
            "bytes_per_device": row["bytes_per_device"],
            "count_per_step": 0,
            "dtypes": dtypes,
            "in_loop": row["in_loop"],
            **({"ragged": True} if ragged else {}),
        }
        texts = (row["component"] or "", row["phase"] or "", row["kind"], ",".join(row["axes"]), ",".join(dtypes))
        key = (*texts, ragged, row["in_loop"], row["bytes_per_device"])
        rows.setdefault(key, locked)["count_per_step"] += row["count_per_step"]
    return {
        "target": target,
        "versions": dict(versions),
        "collectives": [rows[key] for key in sorted(rows)],
        "memory": {name: program["memory"][name] for name in COMPILED_MEMORY},
    }


def read_lock(value: object, source: str) -> Lock:
    """The lock in a JSON value. Raises InputError for another format, and for a value that is no lock."""
    try:
        found = check_fields("the lock", value, {})
        if MARK not in found:
            raise NotSavedError(f"it has no '{MARK}'")
        if not is_integer(found[MARK]):
            raise NotSavedError(f"'{MARK}' is not a whole number")
        if found[MARK] != FORMAT:
            raise InputError(
                f"{source}: a lock of format {found[MARK]}, and this shardwright reads format {FORMAT}. Write it anew "
                f"with this one's `shardwright lock`, or check it with the shardwright that wrote it."
            )
        for name in found:
            if name not in (*NOT_OF_THE_PLAN, *HELD, *HELD_IF_SET, ANSWER, *LISTS):
                raise NotSavedError(f"it has '{name}', which no lock holds")
        compiled = found.get("compiled")
        plan = check_plan({key: found[key] for key in found if key not in NOT_OF_THE_PLAN}, findings=False)
        _check_rows(plan)
        if compiled is not None:
            _only_held(check_compiled(compiled)["collectives"], "collectives", COMPILED_COLLECTIVE, " of 'compiled'")
        return Lock(
            request=LockRequest.from_json(found.get("request")),
            declared=_check_declaration(found.get("declaration")),
            plan=plan,
            compiled=compiled,
        )
    except NotSavedError as why:
        raise why.within(source, "a lock", HOW) from None


NOT_OF_THE_PLAN = (MARK, "request", "declaration", "compiled")
LISTS = ("choices", "training_only", "tensors", "collectives", "memory")

FOLLOWS = ("shard_group", "replica_group", "unpadded_shape")

IN_ROWS: Mapping[str, Sequence[str]] = {
    "choices": [name for name in CHOICE if name not in ("costs", "wire_bytes")],
    "training_only": tuple(TRAINING_ONLY),
    "tensors": [name for name in TENSOR if name not in FOLLOWS],
    "collectives": [name for name in COLLECTIVE if name != "seconds"],
}
"""The fields that a lock holds of each row of a plan. `_locked_tensor` and `_locked_collective` leave the others out."""

DECLARATION: Fields = {
    "name": maybe(TEXT),
    "mesh": needed(object_of(ANYTHING)),
    "roles": needed(object_of(object_of(ANYTHING))),
    "move": needed(object_of(TEXT)),
    "rules": maybe(object_of(object_of(TEXTS))),
}
"""The fields that ``declared_changes`` reads. The values themselves are read as those of a layout."""


def moved(lock: Lock, now: Lock) -> Difference:
    """What moved since a lock was written. The compiled programs are compared only where both have one."""
    return difference(lock.rows, now.rows)


def is_lock(value: object) -> bool:
    """Whether a JSON value has the mark of a lock, of any format."""
    return isinstance(value, dict) and MARK in value


def line_of(text: str, tensors: Iterable[str]) -> int:
    """The number of the first line of a lock's text that has one of these tensors; 1 where none does."""
    starts = tuple(f'{{"name": {_one_line(name)},' for name in tensors)
    return next((n for n, line in enumerate(text.split("\n"), start=1) if line.lstrip().startswith(starts)), 1)


def _check_declaration(value: object) -> Mapping[str, Any]:
    found = check_fields("'declaration'", value, DECLARATION)
    for name in found:
        if name not in DECLARATION:
            raise NotSavedError(f"'declaration' has '{name}', which no layout declares")
    for name in found["move"]:
        if name not in MOVED:
            raise NotSavedError(f"'move' of 'declaration' has '{name}', which no layout declares")
    return found


def _check_rows(plan: Mapping[str, Any]) -> None:
    """Refuse fields that `lock` never writes and that a comparison would miss. Raises NotSavedError."""
    for key, names in IN_ROWS.items():
        _only_held(plan.get(key, ()), key, names)
    for number, row in enumerate(plan["collectives"]):
        for name, times in Counter(row.get("tensors", ())).items():
            if times > 1:
                raise NotSavedError(
                    f"'tensors' of 'collectives' {number} has '{name}' {times} times, and may have it once"
                )
    first: dict[tuple[str, str], int] = {}
    for number, row in enumerate(plan["tensors"]):
        for name in row:
            first.setdefault((row["kind"], name), number)
    # An older shardwright may have left a field out, but then out of every row.
    for number, row in enumerate(plan["tensors"]):
        for kind, name in first:
            if kind == row["kind"] and name not in row:
                raise NotSavedError(f"'tensors' {number} has no '{name}', and 'tensors' {first[kind, name]} has one")


def _only_held(rows: Iterable[Mapping[str, Any]], key: str, names: Container[str], of: str = "") -> None:
    for number, row in enumerate(rows):
        for name in row:
            if name not in names:
                raise NotSavedError(f"'{key}' {number}{of} has '{name}', which no lock holds")


def _rounded(value: Any) -> Any:
    """A JSON value whose fractions have ``ANSWER_DIGITS``: a change of less is none that a review must see."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.{ANSWER_DIGITS}g}") if isinstance(value, float) else value


def _locked_tensor(row: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
    """A row without what follows from its spec at rest and from the model."""
    locked = {name: value for name, value in row.items() if name not in FOLLOWS}
    for name in SPECS:
        if name in locked:
            locked[name] = without_size_one(locked[name], mesh)
    locked["gradient"] = {axis: how for axis, how in row["gradient"].items() if mesh[axis] != 1}
    if row["kind"] != "weight":
        del locked["gradient"]
    return locked


def _locked_collective(row: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
    locked = {name: value for name, value in row.items() if name != "seconds"}
    axes = [axis for axis in row["axes"] if mesh[axis] != 1]
    return {**locked, "axes": axes, "tensors": list(dict.fromkeys(row["tensors"]))}


def _lines(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """JSON text with line breaks at the places in ``ONE_A_LINE``."""
    if not value or (path and path not in ONE_A_LINE):
        yield _one_line(value)
        return
    indent = " " * (len(path) + 1)
    items = _items(value, path)
    yield "{" if isinstance(value, Mapping) else "["
    for number, (start, lines) in enumerate(items, start=1):
        end = "," if number < len(items) else ""
        for line_number, line in enumerate(lines, start=1):
            first = f"{indent}{start}" if line_number == 1 else ""
            yield f"{first}{line}{end if line_number == len(lines) else ''}"
    closing = "}" if isinstance(value, Mapping) else "]"
    yield f"{' ' * len(path)}{closing}"


def _items(value: Any, path: tuple[str, ...]) -> Sequence[tuple[str, list[str]]]:
    if isinstance(value, Mapping):
        return [(f"{_one_line(key)}: ", list(_lines(item, (*path, key)))) for key, item in value.items()]
    return [("", [_one_line(item)]) for item in value]


def _one_line(value: Any) -> str:
    # Names are written without escapes, as people read them; json.loads reads both.
    return json.dumps(value, ensure_ascii=False)
