"""Compiles every case, holds it against what was predicted, and writes docs/compiled.md.

    python -m tests.targets.table [--only TEXT] [--large]

Needs the compilers (`make test-targets` installs them). With --only nothing is written. --large: the largest models too.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shardwright.cli.compile import Compiled, compile_plan, without_hardware
from shardwright.cli.devices import simulate_devices
from shardwright.cli.request import asked, planned
from tests.targets.cases import CASES, LARGE, Case
from tests.targets.predicted import kept, predicted

PAGE = Path(__file__).parent.parent.parent / "docs" / "compiled.md"
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. Bytes are those of a step on one device; errors are shares of what was compiled."""

    case: Case
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
            f"{self.peak / GB:6.2f} GB {self.memory_error:+.1%}  {self.seconds:5.0f} s  {self.case.name}{unmatched}"
        )


def row_of(case: Case, compiled: Compiled) -> Row:
    plan, program, agreement = compiled.plan, compiled.program, compiled.agreement
    return Row(
        case=case,
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
    began, rows, moved = time.monotonic(), [], []
    cases = [case for case in (*CASES, *(LARGE if given.large else ())) if given.only in case.name]
    for number, case in enumerate(cases, 1):
        question = asked(case.model, case.layout, case.options)
        plan = planned(question)
        if predicted(plan) != kept()[case.name]:
            moved.append(case.name)
            continue
        rows.append(row_of(case, compile_plan(question, plan, case.chips)))
        print(f"{time.monotonic() - began:5.0f} s {number:2d}/{len(cases)} {rows[-1].told}", flush=True)
    for name in moved:
        print(f"not what was predicted any more: {name} (python -m tests.targets.predicted)", file=sys.stderr)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory at most")
    if given.only or moved:
        return 1 if moved else 0
    from tests.targets.page import page

    PAGE.write_text(page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
