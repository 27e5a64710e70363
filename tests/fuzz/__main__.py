"""``python -m tests.fuzz --cases 7000 --seed S``: a table of kinds, exit codes, times and memory, and each fault with the command that reproduces it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.fuzz.kinds import KINDS
from tests.fuzz.running import Outcome, cases, run_part


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=7000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--case", type=int, help="only this case of the kind")
    options = parser.parse_args()
    chosen = [(kind, index) for kind, index in cases(options.cases) if options.kind in (None, kind)]
    if options.case is not None:
        chosen = [(options.kind, options.case)]
    parts = [(chosen[part :: options.jobs], options.seed) for part in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        outcomes = [outcome for part in pool.map(run_part, parts) for outcome in part]
    print(table(outcomes, options.seed))
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        print(f"\n{outcome.kind} {outcome.index}: {list(outcome.arguments)}"[:1000])
        print(outcome.wrong.rstrip()[-3000:])
        print(f"again: python -m tests.fuzz --seed {options.seed} --kind '{outcome.kind}' --case {outcome.index}")
    return 1 if wrong else 0


def table(outcomes: Iterable[Outcome], seed: int) -> str:
    """One line for each kind."""
    lines = [
        f"seed {seed}",
        f"{'kind':<14} {'cases':>6} {'exit 0':>7} {'exit 1':>7} {'exit 2':>7} {'wrong':>6} {'slowest':>9} {'peak':>9}",
    ]
    every = list(outcomes)
    for kind in (*KINDS, "all"):
        of = [each for each in every if kind in (each.kind, "all")]
        if of:
            codes = [sum(each.code == code and not each.wrong for each in of) for code in (0, 1, 2)]
            slowest = max(each.seconds for each in of)
            peak = max(each.peak_bytes for each in of) / (1 << 20)
            wrong = sum(bool(each.wrong) for each in of)
            lines.append(
                f"{kind:<14} {len(of):>6} {codes[0]:>7} {codes[1]:>7} {codes[2]:>7} {wrong:>6} {slowest:>7.2f} s {peak:>5.0f} MiB"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
