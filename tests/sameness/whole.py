"""Trains every case, compares it with one device and writes docs/sameness.md; fails where a case is not the same.

    python -m tests.sameness.whole [--jobs 2] [--only TEXT | --new]

With ``--only``, only cases with the text in their names are trained, and the page keeps the rows of the others; with ``--new``, only those
without a row.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import jax

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from tests.engine_jax.steps import Case, Difference, assert_same, difference
from tests.sameness import random_policies, stage_cases
from tests.sameness.cases import MODELS, PAIRS, WHOLE
from tests.sameness.measure import Measured, measured, watched
from tests.sameness.page import COMPARED, PAGE, page, pairs_table, row, rows_on, section_of, with_section
from tests.sameness.random_page import TITLES


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--new", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    before = PAGE.read_text(encoding="utf-8")
    some = options.new or options.only
    had = rows_on(before) if some else {}
    cases = [case for case in WHOLE if options.only in f"{case.model} {case}" and not (options.new and case in had)]
    # Cases of one model and one batch follow each other, so that few runs on one device are repeated.
    cases.sort(key=lambda case: (MODELS.index(case.model), case.settings, case.rows))
    found: dict[Case, Measured] = {}
    failed: list[str] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(trained, case): case for case in cases}
        for number, done in enumerate(as_completed(futures), 1):
            case, (result, wrong) = futures[done], done.result()
            if result is not None:
                found[case] = result
            if wrong:
                failed.append(f"{case.model} {case}: {wrong}")
            seconds = time.monotonic() - start
            print(f"{seconds:6.0f} s {number:3d}/{len(cases)} {line(case, result, wrong)}", flush=True)
        pairs = [] if some else list(pool.map(compared, PAIRS))
    rows = {**had, **{case: row(one) for case, one in found.items()}}
    failed += [f"{case.model} {case}: it has no row on the page" for case in WHOLE if case not in rows]
    for message in failed:
        print(f"not the same: {message}", file=sys.stderr)
    if not failed:
        text = page(rows, (section_of(before, COMPARED) or "") if some else "\n".join(pairs_table(pairs)))
        # Another command writes these sections: they are kept.
        for title in (*TITLES.values(), stage_cases.TITLE, random_policies.TITLE):
            if body := section_of(before, title):
                text = with_section(text, title, body)
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE}: {len(found)} cases")
    return 1 if failed else 0


def trained(case: Case) -> tuple[Measured | None, str]:
    """The measurement of a case, and a message where it fails."""
    try:
        result, ours, theirs = measured(case)
    except Exception as error:  # A case that cannot be trained is reported with the others.
        return None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        jax.clear_caches()
    try:
        assert_same(ours.run, theirs.run, case.tolerance)
    except AssertionError as error:
        return result, str(error)
    return result, ""


def compared(pair: tuple[Case, Case]) -> tuple[Case, Case, Difference]:
    """Two layouts, compared with each other."""
    ours, theirs = (watched(case).run for case in pair)
    assert_same(ours, theirs, pair[0].tolerance)
    return (*pair, difference(ours, theirs))


def line(case: Case, result: Measured | None, wrong: str) -> str:
    words = [case.model, str(case)]
    if result is not None:
        words.append(f"loss {result.difference.loss:.1e}, gradient {result.difference.gradient:.1e}")
        if result.routing is not None:
            words.append(f"margin {result.routing.margin:.1e}, {result.routing.flipped} flipped")
    return " ".join([*words, *(["NOT THE SAME:", wrong.splitlines()[0]] if wrong else [])])


if __name__ == "__main__":
    sys.exit(main())
