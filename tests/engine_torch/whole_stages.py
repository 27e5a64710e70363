"""Trains every case in stages on PyTorch, compares it with one device of PyTorch, and writes its section of docs/sameness-torch.md; fails
where one is not the same.

    python -m tests.engine_torch.whole_stages [--only TEXT | --new]

With ``--only``, only cases with the text in their names are trained, and nothing is written; with ``--new``, only those without a row on the
page, which keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import STEPS, Case, Difference, assert_same, batches_of, difference
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RanksRun, trained, trained_on
from tests.engine_torch.staged import Staged, plan_in_stages
from tests.engine_torch.test_stages import CASES
from tests.engine_torch.whole import PAGE
from tests.sameness.page import section_of, with_section

TITLE = "Stages"
HEAD = f"""Each case trains {STEPS} steps in stages, and is compared with one device of PyTorch (`python -m tests.engine_torch.whole_stages`): the
same rows, unequal numbers of valid tokens, gradients clipped in every step. `make test` trains the first steps of eight of them. Units,
microbatches and what is beside the stages are in the second column.

| model | case | loss | gradient | of |
|---|---|---:|---:|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--new", action="store_true")
    given = parser.parse_args()
    ranks = Ranks(8, in_group)
    found, failed = rows_on(PAGE.read_text(encoding="utf-8")) if given.new else {}, 0

    @cache
    def alone(case: Case) -> RanksRun:
        return trained(ranks.first(1), case, STEPS)

    try:
        for case in CASES:
            if case in found or given.only not in str(case):
                continue
            ours = trained_on(
                ranks.first(case.num_ranks), plan_in_stages(case), batches_of(case.alone, STEPS), case.alone.seed
            )
            theirs = alone(case.alone)
            found[case] = row(case, difference(ours.run, theirs.run))
            print(found[case], flush=True)
            try:
                assert_same(ours.run, theirs.run, case.alone.tolerance)
            except AssertionError as error:
                failed += 1
                print(f"not the same: {error}", file=sys.stderr, flush=True)
    finally:
        ranks.end()
    if not given.only and not failed:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, TITLE, HEAD + "\n".join(found[case] for case in CASES)), encoding="utf-8")
    return 1 if failed else 0


def rows_on(page: str) -> dict[Staged, str]:
    """The rows of a page, of the cases that it has."""
    lines = (section_of(page, TITLE) or "").splitlines()
    return {case: line for case in CASES for line in lines if line.startswith(name_of(case))}


def name_of(case: Staged) -> str:
    """The first cells of a case's row."""
    # A bar would end the cell.
    name = str(case).removeprefix(f"{case.model} ").replace("|", "&#124;")
    return f"| {case.model} | {name} |"


def row(case: Staged, one: Difference) -> str:
    return f"{name_of(case)} {one.loss:.1e} | {one.gradient:.1e} | {one.weight} |"


if __name__ == "__main__":
    sys.exit(main())
