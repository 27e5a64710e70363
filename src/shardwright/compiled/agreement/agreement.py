"""Predicted and compiled: the collectives of a plan compared with those of its compiled program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiled.agreement.matching import AgreementRow, State, matched_rows, total
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of a comparison. ``rows``: in the order of the components, those without one last.

    ``predicted_bytes`` and ``compiled_bytes``: the memory of one device, the plan's estimate and the program's peak.
    """

    rows: tuple[AgreementRow, ...]
    predicted_bytes: int
    compiled_bytes: int

    def of_state(self, state: State) -> tuple[AgreementRow, ...]:
        return tuple(row for row in self.rows if row.state == state)

    def row_of(self, one: CompiledCollective) -> AgreementRow:
        """The row of a collective of the program, the first with its kind, component and axes."""
        same = [row for row in self.rows if (row.kind, row.component) == (one.kind, one.component)]
        same = [row for row in same if set(row.axes) == set(one.axes)]
        return same[0] if same else _unplanned_row(one)

    @property
    def bytes_error(self) -> float:
        """The difference in bytes of the matched rows, as a share of their expected bytes."""
        matched = self.of_state("matched")
        missed = sum(abs(row.compiled_bytes - row.expected_bytes) for row in matched)
        return _share(missed, sum(row.expected_bytes for row in matched))

    @property
    def explained_share(self) -> float:
        """The bytes that only rewrites explain, as a share of all bytes, the larger side of each row."""
        return _share(sum(row.explained_bytes for row in self.rows), sum(row.bytes for row in self.rows))

    @property
    def memory_error(self) -> float:
        """The predicted memory less the peak, as a share of the peak: positive if the plan predicts too much."""
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
    """Compare the collectives of the plan and the program, and explain differences by known rewrites."""
    return Agreement(
        rows=in_order(matched_rows(plan, program)),
        predicted_bytes=plan.memory.total_bytes_per_device,
        compiled_bytes=program.memory.peak_bytes,
    )


def in_order(rows: Iterable[AgreementRow]) -> tuple[AgreementRow, ...]:
    """By component in the order of the forward pass, then the largest first."""
    places: Sequence[str | None] = (*COMPONENTS, None)
    return tuple(sorted(rows, key=lambda row: (places.index(row.component), -row.bytes, row.kind, row.axes)))


def _unplanned_row(one: CompiledCollective) -> AgreementRow:
    """The row of a collective whose bytes are in a row of another name or kind, which explains it."""
    return AgreementRow(
        component=one.component,
        kind=one.kind,
        axes=one.axes,
        compiled_bytes=total([one]),
        compiled_count=one.count_per_step,
        state="explained",
    )


def _share(amount: float, reference: float) -> float:
    return amount / reference if reference else 0.0
