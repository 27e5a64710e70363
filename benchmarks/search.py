"""Time of `shardwright search` for big models on the cores of this machine, and whether its answer is certain.

python -m benchmarks.search [--quick] [--only TEXT]: --quick searches a tenth of the time
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.search.searching import Search, processes_here
from shardwright.search.solving import Solver
from shardwright.search.space import Free, policies_of, space_of

KEPT = 10

WITHIN = 0.02
"""As `shardwright search` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A search and the longest time that it may take. ``rests``: the dtype of weights and moments at rest."""

    name: str
    model: str
    chips: str
    batch: int
    length: int
    limit_s: float
    engine: str = "jax"
    rests: str = "float32"


CASES = (
    Case(name="70B on 256 H100", model="llama3-70b", chips="h100:32x8", batch=512, length=8192, limit_s=30),
    Case(
        name="671B on 128 H100",
        model="deepseek3-671b",
        chips="h100:16x8",
        batch=1024,
        length=4096,
        limit_s=120,
        rests="bfloat16",
    ),
    Case(
        name="671B on 128 v5p",
        model="deepseek3-671b",
        chips="v5p:4x4x8",
        batch=1024,
        length=4096,
        limit_s=120,
        rests="bfloat16",
    ),
    Case(name="671B on 2,048 H100", model="deepseek3-671b", chips="h100:256x8", batch=8192, length=4096, limit_s=600),
)
"""The limits are those of two idle cores."""


def cpu_s() -> float:
    """Of this process and of all that it has waited for."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def main() -> None:
    """Search each case until its answer is certain or its limit is over."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for case in CASES:
        if options.only not in case.name:
            continue
        limit_s = case.limit_s / 10 if options.quick else case.limit_s
        # Others may use the cores: then two processes get less of them in the same time.
        wait_s = limit_s * max(1.0, 1 + options.load_before / processes_here())
        asked = PlanOptions(
            chips=case.chips,
            batch=case.batch,
            length=case.length,
            engine=case.engine,
            weights_dtype=case.rests,
            moments_dtype=case.rests,
        )
        typed = typed_request(case.model, "fsdp", asked)
        assert typed.machine is not None
        free = Free(policies=policies_of(typed.request.table, to_host=False))
        solver = Solver(request=typed.request, machine=typed.machine, free=free)
        began, cpu_before = time.perf_counter(), cpu_s()
        space = space_of(typed.request, typed.machine)
        outcome = Search(solver, space, keep=KEPT, within=WITHIN, budget_s=wait_s, processes=processes_here()).run()
        seconds, used_s = time.perf_counter() - began, cpu_s() - cpu_before
        best = outcome.answers[0] if outcome.answers else None
        left = outcome.least_seconds
        tokens = None if best is None else case.batch * case.length / best.seconds / typed.machine.num_devices
        rows.append(
            [
                case.name,
                f"{seconds:.0f}",
                f"{used_s:.0f}",
                f"{case.limit_s:.0f}",
                f"{len(space.arrangements):,}",
                f"{outcome.priced:,}",
                "yes" if left is None else f"no: none left is faster than {left:.3g} s",
                "nothing fits" if best is None else f"{best.arrangement.key}; {best.setting.text}",
                "" if best is None else f"{best.seconds:.3g}",
                "" if tokens is None else f"{tokens:,.0f}",
            ]
        )
        numbers.append(
            {
                "case": case.name,
                "seconds": seconds,
                "cpu_seconds": used_s,
                "limit_s": limit_s,
                "within": WITHIN,
                "layouts": len(space.arrangements),
                "priced": outcome.priced,
                "least_seconds_left": left,
                "ended": dict(sorted(outcome.ended.items())),
                "answers": [{"seconds": node.seconds, "text": node.text} for node in outcome.answers],
            }
        )
    keep(
        Found(
            name="search",
            title="Time of `shardwright search`",
            columns=[
                "search",
                "s",
                "CPU s",
                "limit",
                "layouts",
                "priced",
                "certain",
                "best",
                "step, s",
                "tokens/s a device",
            ],
            rows=rows,
            headline="; ".join(
                f"{row[0]} {row[2]} CPU s of {processes_here()} times {row[3]}, certain: {row[6].split(':')[0]}"
                for row in rows
            ),
            notes=[
                f"{processes_here()} processes; the limits are for two idle cores, which are twice as many CPU s. Where others use the cores a search may take "
                "so much longer as the load says. Certain: nothing is more than 2% faster."
            ],
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
