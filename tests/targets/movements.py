"""Some cases line by line: every predicted and compiled collective, and the largest temporaries, stored for the pages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.cli.running.compile import Compiled
from shardwright.compiled.agreement.matching import AgreementRow
from tests.targets.cases import CASES, LARGE, MIXTRAL, Case

FILE = Path(__file__).parent / "movements.json"
LARGEST = 4
"""The number of temporaries stored for a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """A line of a comparison: the collectives of one component, kind and axes, with bytes and executions per step and device.

    ``weights``: those in the program's collectives of this line.
    """

    component: str | None
    kind: str
    axes: tuple[str, ...]
    weights: tuple[str, ...]
    predicted_bytes: int
    predicted_count: int
    compiled_bytes: int
    compiled_count: int
    state: str
    compiled_as: tuple[str, ...]
    explained_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A temporary of a step, by the operation that computes it; ``num_values`` such, not all live at the same time."""

    bytes_per_device: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    component: str | None
    phase: str | None
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Movements:
    """A case line by line."""

    case: str
    lines: tuple[Movement, ...]
    largest: tuple[Held, ...]


def is_kept(case: Case) -> bool:
    """Whether a case is stored line by line: tokens or weights on three targets, and the large ones on TPU."""
    return _tokens_or_weights(case) or (case in LARGE and case.chips.startswith("v5p"))


def tokens_or_weights() -> tuple[Case, ...]:
    """The cases of one model on the same number of devices that send tokens, and those that gather weights."""
    return tuple(case for case in CASES if _tokens_or_weights(case))


def movements_of(case: Case, compiled: Compiled) -> Movements:
    return Movements(
        case=case.name,
        lines=tuple(_movement(compiled, row) for row in compiled.agreement.rows),
        largest=tuple(
            Held(
                bytes_per_device=one.bytes_per_device,
                dtype=one.dtype,
                shape=one.shape,
                op=one.op,
                component=one.component,
                phase=one.phase,
                num_values=one.num_values,
            )
            for one in compiled.program.memory.largest[:LARGEST]
        ),
    )


def kept_movements() -> dict[str, Movements]:
    """The stored results, by the names of the cases."""
    if not FILE.exists():
        return {}
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        one["case"]: Movements(
            case=one["case"],
            lines=tuple(Movement(**_tuples(line)) for line in one["lines"]),
            largest=tuple(Held(**_tuples(held)) for held in one["largest"]),
        )
        for one in found
    }


def keep_movements(found: Iterable[Movements]) -> None:
    """Write one line per movement, so that a change of one is one line of the diff."""
    cases = ",\n".join(_case_as_json(one) for one in found)
    FILE.write_text(f"[\n{cases}\n]\n", encoding="utf-8")


def _tokens_or_weights(case: Case) -> bool:
    return (case.model, case.mesh) == (MIXTRAL["model"], "expert=8")


def _movement(compiled: Compiled, row: AgreementRow) -> Movement:
    known = {weight.name for weight in compiled.plan.weights}
    kinds = (row.kind, *row.compiled_as)
    weights = {
        name
        for one in compiled.program.collectives
        if one.component == row.component and one.kind in kinds and set(one.axes) == set(row.axes)
        for name in one.tensors
        if name in known
    }
    return Movement(
        component=row.component,
        kind=row.kind,
        axes=row.axes,
        weights=tuple(sorted(weights)),
        predicted_bytes=row.predicted_bytes,
        predicted_count=row.predicted_count,
        compiled_bytes=row.compiled_bytes,
        compiled_count=row.compiled_count,
        state=row.state,
        compiled_as=row.compiled_as,
        explained_by=row.explained_by,
    )


def _case_as_json(one: Movements) -> str:
    lines = ",\n".join(f"   {json.dumps(asdict(line))}" for line in one.lines)
    largest = ",\n".join(f"   {json.dumps(asdict(held))}" for held in one.largest)
    return f' {{\n  "case": {json.dumps(one.case)},\n  "lines": [\n{lines}\n  ],\n  "largest": [\n{largest}\n  ]\n }}'


def _tuples(found: dict[str, object]) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
