"""Compiles cases, compares them with their predictions, stores the results, and writes the pages.

    python -m tests.targets.table [--only TEXT] [--large]
    python -m tests.targets.table --pages
    python -m tests.targets.table --peer

Needs the compilers (`make test-targets` installs them). --only: cases with this in their names. --large: the largest models
too. The results of a case stay until it is compiled again. --pages compiles nothing and writes the pages again; --peer
prints the comparison with MaxText from the stored results.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

from shardwright.cli.running.compile import compile_plan, without_hardware
from shardwright.cli.typed.devices import simulate_devices
from shardwright.cli.typed.request import planned, typed_request
from tests.targets.cases import CASES, LARGE, Case
from tests.targets.moe_page import moe_page
from tests.targets.movements import (
    Movements,
    is_kept,
    keep_movements,
    kept_movements,
    movements_of,
    tokens_or_weights,
)
from tests.targets.page import page
from tests.targets.peer import peer_page
from tests.targets.predicted import kept, predicted
from tests.targets.row import Row, keep_rows, kept_rows, row_of

DOCS = Path(__file__).parent.parent.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--peer", action="store_true")
    given = parser.parse_args()
    if given.peer:
        print(peer_page(kept_rows(), kept_movements()), end="")
        return 0
    if given.pages:
        write_pages()
        return 0
    return compile_cases([case for case in (*CASES, *(LARGE if given.large else ())) if given.only in case.name])


def compile_cases(cases: list[Case]) -> int:
    """Compile each case and store its results at once. 1 if a plan differs from the stored prediction."""
    without_hardware(os.environ, jax_is_loaded=False)
    simulate_devices(8, os.environ, jax_is_loaded=False)
    began, changed = time.monotonic(), []
    for number, case in enumerate(cases, 1):
        question = typed_request(case.model, case.layout, case.options)
        plan = planned(question)
        if predicted(plan) != kept()[case.name]:
            changed.append(case.name)
            continue
        compiled = compile_plan(question, plan, case.chips)
        row = row_of(case, compiled)
        keep(row, movements_of(case, compiled) if is_kept(case) else None)
        print(f"{time.monotonic() - began:5.0f} s {number:2d}/{len(cases)} {row.text}", flush=True)
    for name in changed:
        print(f"the plan differs from its prediction: {name} (python -m tests.targets.predicted)", file=sys.stderr)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory at most")
    return 1 if changed else 0


def keep(row: Row, movements: Movements | None) -> None:
    """Store the results with those of the other cases, and write the pages."""
    rows = {**kept_rows(), row.case: row}
    keep_rows(rows[case.name] for case in (*CASES, *LARGE) if case.name in rows)
    if movements is not None:
        found = {**kept_movements(), row.case: movements}
        keep_movements(found[case.name] for case in (*CASES, *LARGE) if case.name in found)
    write_pages()


def write_pages() -> None:
    """Write the pages of all stored results."""
    rows, movements = kept_rows(), kept_movements()
    pages = {
        "compiled.md": page([case for case in (*CASES, *LARGE) if case.name in rows], rows),
        "compiled-moe.md": moe_page(tokens_or_weights(), movements),
        "beside-maxtext.md": peer_page(rows, movements),
    }
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
