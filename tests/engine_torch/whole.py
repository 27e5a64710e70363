"""Trains every case with both engines for all steps, and writes docs/sameness-torch.md; fails where a case is not the same.

    python -m tests.engine_torch.whole [--only TEXT | --new]

With ``--only``, only cases with the text in their names are trained, and nothing is written; with ``--new``, only those without a row on the
page, which keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import STEPS, Case, Difference, assert_same, difference, run_of
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import in_words, trained
from tests.engine_torch.test_against_jax import CASES
from tests.sameness.page import policy_words, section_of, with_section

PAGE = Path(__file__).parent.parent.parent / "docs" / "sameness-torch.md"
HEAD = f"""# How much the two engines differ

The same seed, rows and layout, on four ranks of PyTorch over Gloo and on one device of the JAX engine. `make test-all` trains
each case and writes this page again; `make test` trains the first steps of eight of them and writes nothing.

Each case: float32, {STEPS} steps of 2 microbatches, AdamW, rows of very unequal numbers of valid tokens, gradients clipped in every
step. The states before the first step are bitwise equal.

- *loss*: the largest relative difference of a step's loss. Allowed: 1e-5 without experts, 1e-4 with them.
- *gradient*: the largest |g - g1| / |g1| over steps 1 and 2, all weights and all layers, before clipping, and its weight
  (*of*); g1 is the gradient of the JAX engine. Allowed: 1e-4.

| model | layout | mesh | more | loss | gradient | of |
|---|---|---|---|---:|---:|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--new", action="store_true")
    given = parser.parse_args()
    start, failed = time.monotonic(), []
    found = rows_on(PAGE.read_text(encoding="utf-8")) if given.new else {}
    cases = [case for case in CASES if given.only in in_words(case) and case not in found]
    ranks = Ranks(4, in_group)
    try:
        for number, case in enumerate(cases, 1):
            ours, theirs = trained(ranks, case, STEPS).run, run_of(case.alone, STEPS)
            apart = difference(ours, theirs)
            found[case] = line(case, apart)
            try:
                assert_same(ours, theirs, case.tolerance)
            except AssertionError as wrong:
                failed.append(f"{in_words(case)}: {wrong}")
            print(f"{time.monotonic() - start:6.0f} s {number:2d}/{len(cases)} {found[case]}", flush=True)
    finally:
        ranks.end()
    for one in failed:
        print(f"not the same: {one}", file=sys.stderr)
    if not given.only and not failed:
        # Another command writes the section of stages: it is kept.
        stages = section_of(PAGE.read_text(encoding="utf-8"), "Stages")
        page = HEAD + "\n".join(found[case] for case in CASES) + "\n"
        PAGE.write_text(with_section(page, "Stages", stages) if stages else page, encoding="utf-8")
    return 1 if failed else 0


def line(case: Case, apart: Difference) -> str:
    return f"{cells(case)} {apart.loss:.1e} | {apart.gradient:.1e} | {apart.weight} |"


def cells(case: Case) -> str:
    """The first cells of a case's row."""
    chunks = f"{case.loss_chunks} chunks of the loss" if case.loss_chunks > 1 else ""
    words = case.move, case.settings, "head-tail" if case.balanced else "", chunks, policy_words(case)
    return f"| {case.model} | {case.layout} | {case.mesh} | {', '.join(word for word in words if word)} |"


def rows_on(page: str) -> dict[Case, str]:
    """The rows of a page, of the cases that it has."""
    lines = page.partition("\n## ")[0].splitlines()
    return {case: line for case in CASES for line in lines if line.startswith(cells(case))}


if __name__ == "__main__":
    sys.exit(main())
