"""Trains every case in stages on JAX, compares it with one device, and writes its section of docs/sameness.md; fails where one is not the
same.

    python -m tests.sameness.stages [--only TEXT | --new]

With ``--only``, only cases with the text in their names are trained, and nothing is written; with ``--new``, only those without a row on the
page, which keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import STEPS, Case, Difference, assert_same, difference, run_of
from tests.sameness.page import PAGE, section_of, with_section
from tests.sameness.stage_cases import STAGED, TITLE

HEAD = f"""Each case trains {STEPS} steps in stages, with schedule `circular`, and is compared with one device, as the cases above
(`python -m tests.sameness.stages`). Microbatches and the units of each stage are given where they are not the even share.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--new", action="store_true")
    options = parser.parse_args()
    found = rows_on(PAGE.read_text(encoding="utf-8")) if options.new else {}
    failed = 0
    for case in STAGED:
        if case in found or options.only not in f"{case.model} {case}":
            continue
        ours, theirs = run_of(case, STEPS), run_of(case.alone, STEPS)
        found[case] = row(case, difference(ours, theirs))
        print(found[case], flush=True)
        try:
            assert_same(ours, theirs, case.tolerance)
        except AssertionError as error:
            failed += 1
            print(f"not the same: {error}", file=sys.stderr, flush=True)
    if not options.only and not failed:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLE, section(found)), encoding="utf-8")
    return 1 if failed else 0


def section(found: Mapping[Case, str]) -> str:
    lines = [HEAD, "| model | case | loss | gradient | of |", "|---|---|---:|---:|---|"]
    return "\n".join([*lines, *(found[case] for case in STAGED)])


def rows_on(page: str) -> dict[Case, str]:
    """The rows of a page, of the cases that it has."""
    lines = (section_of(page, TITLE) or "").splitlines()
    return {case: line for case in STAGED for line in lines if line.startswith(name_of(case))}


def name_of(case: Case) -> str:
    """The first cells of a case's row."""
    # A bar would end the cell.
    return f"| {case.model} | {str(case).replace('|', '&#124;')} |"


def row(case: Case, one: Difference) -> str:
    return f"{name_of(case)} {one.loss:.1e} | {one.gradient:.1e} | {one.weight} |"


if __name__ == "__main__":
    sys.exit(main())
