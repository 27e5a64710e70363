"""Predicted beside compiled: the collectives of a plan, and those of the program that a compiler made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.compiled.program import CompiledProgram
from shardwright.core.plan import Plan
from shardwright.core.roles import COMPONENTS

State = Literal["matched", "explained", "unmatched"]

TOLERANCE = 0.01
"""Bytes agree where they differ by no more than this share of what was predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """The collectives of one component, kind and axes: what the plan expects in a step, and what the program has.

    Bytes and counts are those of a step on one device, bytes of one execution times executions. ``component`` None: the
    compiler kept no scope, and nothing else says whose it is. ``compiled_as``: the kinds that the compiler made of the
    plan's, where they are others. ``explained_by``: the rewrites, by name, that explain a difference.
    """

    component: str | None
    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int
    predicted_count: int
    compiled_bytes: int
    compiled_count: int
    state: State
    compiled_as: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Bytes a step that the program moves beyond what the plan expects; negative where it moves less."""
        return self.compiled_bytes - self.predicted_bytes

    @property
    def bytes(self) -> int:
        """The larger side: by how much a row weighs among the others."""
        return max(self.predicted_bytes, self.compiled_bytes)

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "kind": self.kind,
            "axes": list(self.axes),
            "predicted_bytes": self.predicted_bytes,
            "predicted_count": self.predicted_count,
            "compiled_bytes": self.compiled_bytes,
            "compiled_count": self.compiled_count,
            "compiled_as": list(self.compiled_as),
            "difference": self.difference,
            "state": self.state,
            "explained_by": list(self.explained_by),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a comparison found. ``rows`` in the order of the components, those without one last.

    ``predicted_bytes`` and ``compiled_bytes``: the memory of one device, as the plan estimates it, and at its peak.
    """

    rows: tuple[AgreementRow, ...]
    predicted_bytes: int
    compiled_bytes: int

    def of_state(self, state: State) -> tuple[AgreementRow, ...]:
        return tuple(row for row in self.rows if row.state == state)

    @property
    def bytes_error(self) -> float:
        """Of the rows that match, the bytes by which they differ as a share of those predicted."""
        matched = self.of_state("matched")
        return _share(sum(abs(row.difference) for row in matched), sum(row.predicted_bytes for row in matched))

    @property
    def explained_share(self) -> float:
        """Of all rows, the bytes that a rewrite had to explain as a share of all bytes, the larger side of each row."""
        return _share(sum(row.bytes for row in self.of_state("explained")), sum(row.bytes for row in self.rows))

    @property
    def memory_error(self) -> float:
        """The predicted memory less the peak, as a share of the peak: positive where the plan has too much."""
        return _share(self.predicted_bytes - self.compiled_bytes, self.compiled_bytes)

    def to_json(self) -> dict[str, object]:
        return {
            "collectives_matched": len(self.of_state("matched")),
            "collectives_explained": len(self.of_state("explained")),
            "collectives_unmatched": len(self.of_state("unmatched")),
            "bytes_error": self.bytes_error,
            "memory_error": self.memory_error,
            "explained_share": self.explained_share,
            "rows": [row.to_json() for row in self.rows],
        }


def agree(plan: Plan, program: CompiledProgram) -> Agreement:
    """Every collective of the plan beside the program's, and every difference explained by a known rewrite or not."""
    return Agreement(
        rows=in_order(_rows(plan, program)),
        predicted_bytes=plan.memory.total_bytes_per_device,
        compiled_bytes=program.memory.peak_bytes,
    )


def _rows(plan: Plan, program: CompiledProgram) -> Iterable[AgreementRow]:
    keys = [(one.component, one.kind, one.axes) for one in (*plan.collectives, *program.collectives)]
    for component, kind, axes in dict.fromkeys(keys):
        ours = [c for c in plan.collectives if (c.component, c.kind, c.axes) == (component, kind, axes)]
        theirs = [c for c in program.collectives if (c.component, c.kind, c.axes) == (component, kind, axes)]
        predicted = sum(c.bytes_per_device * c.count_per_step for c in ours)
        compiled = sum(c.bytes_per_device * c.count_per_step for c in theirs)
        yield AgreementRow(
            component=component,
            kind=kind,
            axes=axes,
            predicted_bytes=predicted,
            predicted_count=sum(c.count_per_step for c in ours),
            compiled_bytes=compiled,
            compiled_count=sum(c.count_per_step for c in theirs),
            state="matched" if abs(compiled - predicted) <= TOLERANCE * predicted else "unmatched",
        )


def in_order(rows: Iterable[AgreementRow]) -> tuple[AgreementRow, ...]:
    """By component as the forward pass meets them, then the largest first."""
    places: Sequence[str | None] = (*COMPONENTS, None)
    return tuple(sorted(rows, key=lambda row: (places.index(row.component), -row.bytes, row.kind, row.axes)))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
