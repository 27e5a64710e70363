"""Trains every case in stages on JAX, compares it with one device, and writes its section of docs/sameness.md; fails where one is not the
same.

    python -m tests.sameness.stages [--only TEXT]

With ``--only``, only cases with the text in their names are trained, and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import STEPS, Case, Difference, assert_same, difference, run_of
from tests.sameness.page import PAGE, with_section
from tests.sameness.stage_cases import STAGED, TITLE

HEAD = f"""Each case trains {STEPS} steps in stages, with schedule `circular`, and is compared with one device, as the cases above
(`python -m tests.sameness.stages`). Microbatches and the units of each stage are given where they are not the even share.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    found: dict[Case, Difference] = {}
    failed = 0
    for case in STAGED:
        if options.only not in f"{case.model} {case}":
            continue
        ours, theirs = run_of(case, STEPS), run_of(case.alone, STEPS)
        found[case] = difference(ours, theirs)
        print(row(case, found[case]), flush=True)
        try:
            assert_same(ours, theirs, case.tolerance)
        except AssertionError as error:
            failed += 1
            print(f"not the same: {error}", file=sys.stderr, flush=True)
    if not options.only and not failed:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), TITLE, section(found)), encoding="utf-8")
    return 1 if failed else 0


def section(found: Mapping[Case, Difference]) -> str:
    lines = [HEAD, "| model | case | loss | gradient | of |", "|---|---|---:|---:|---|"]
    return "\n".join([*lines, *(row(case, one) for case, one in found.items())])


def row(case: Case, one: Difference) -> str:
    # A bar would end the cell.
    name = str(case).replace("|", "&#124;")
    return f"| {case.model} | {name} | {one.loss:.1e} | {one.gradient:.1e} | {one.weight} |"


if __name__ == "__main__":
    sys.exit(main())
