"""Compiles cases, holds them against what was predicted, keeps what was found, and writes docs/compiled.md of all that is kept.

    python -m tests.targets.table [--only TEXT] [--large]

Needs the compilers (`make test-targets` installs them). --only: cases with this in their names. --large: the largest models
too. What was found for a case stays until it is compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.cli.compile import Compiled, compile_plan, without_hardware
from shardwright.cli.devices import simulate_devices
from shardwright.cli.request import asked, planned
from tests.targets.cases import CASES, LARGE, Case
from tests.targets.predicted import kept, predicted

KEPT = Path(__file__).parent / "compiled.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "compiled.md"
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, by name. Bytes are those of a step on one device; errors are shares of what was compiled."""

    case: str
    predicted_bytes: int
    compiled_bytes: int
    matched: int
    explained: tuple[str, ...]
    explained_share: float
    unmatched: tuple[str, ...]
    bytes_error: float
    predicted_memory: int
    peak: int
    memory_error: float
    seconds: float

    @property
    def told(self) -> str:
        unmatched = f"  UNMATCHED {'; '.join(self.unmatched)}" if self.unmatched else ""
        return (
            f"{self.predicted_bytes / GB:9.3f} {self.compiled_bytes / GB:9.3f} GB  memory {self.predicted_memory / GB:6.2f} "
            f"{self.peak / GB:6.2f} GB {self.memory_error:+.1%}  {self.seconds:5.0f} s  {self.case}{unmatched}"
        )


def row_of(case: Case, compiled: Compiled) -> Row:
    plan, program, agreement = compiled.plan, compiled.program, compiled.agreement
    return Row(
        case=case.name,
        predicted_bytes=sum(one.bytes_per_device * one.count_per_step for one in plan.collectives),
        compiled_bytes=sum(one.bytes_per_device * one.count_per_step for one in program.collectives),
        matched=len(agreement.of_state("matched")),
        explained=tuple(sorted({name for row in agreement.of_state("explained") for name in row.explained_by})),
        explained_share=agreement.explained_share,
        unmatched=tuple(
            f"{row.component} {row.kind} {'/'.join(row.axes)} {row.predicted_bytes / GB:.3f} {row.compiled_bytes / GB:.3f}"
            for row in agreement.of_state("unmatched")
        ),
        bytes_error=agreement.bytes_error,
        predicted_memory=plan.memory.total_bytes_per_device,
        peak=program.memory.peak_bytes,
        memory_error=agreement.memory_error,
        seconds=program.compile_seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    without_hardware(os.environ, jax_is_loaded=False)
    simulate_devices(8, os.environ, jax_is_loaded=False)
    began, moved = time.monotonic(), []
    cases = [case for case in (*CASES, *(LARGE if given.large else ())) if given.only in case.name]
    for number, case in enumerate(cases, 1):
        question = asked(case.model, case.layout, case.options)
        plan = planned(question)
        if predicted(plan) != kept()[case.name]:
            moved.append(case.name)
            continue
        row = row_of(case, compile_plan(question, plan, case.chips))
        keep(row)
        print(f"{time.monotonic() - began:5.0f} s {number:2d}/{len(cases)} {row.told}", flush=True)
    for name in moved:
        print(f"not what was predicted any more: {name} (python -m tests.targets.predicted)", file=sys.stderr)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory at most")
    return 1 if moved else 0


def keep(row: Row) -> None:
    """Beside the others that were found, and on the page."""
    from tests.targets.page import page

    rows = {**found(), row.case: row}
    cases = [case for case in (*CASES, *LARGE) if case.name in rows]
    KEPT.write_text(json.dumps([asdict(rows[case.name]) for case in cases], indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(cases, rows), encoding="utf-8")


def found() -> dict[str, Row]:
    """What was found before, by the names of the cases."""
    if not KEPT.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return {row["case"]: Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows}


if __name__ == "__main__":
    sys.exit(main())
