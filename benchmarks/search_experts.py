"""Layouts that experts chose and published beside the best of a search for the same model, chips and step.

python -m benchmarks.search_experts [--budget SECONDS] [--most N] [--only TEXT]: searches for N more steps, one after the other in this process
python -m benchmarks.search_experts --page: writes the table in docs/search.md of those that are there

A search has what was published of a step: rows, tokens, recomputation, dtypes, precision, options of the chips. It chooses the layout, sizes, stages,
schedules, movements, microbatches and chunks of the loss. Results are kept after every step, so a run goes on from the last.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published.planned import typed
from benchmarks.published.steps import FOLDER, Published, published, steps_of
from benchmarks.results import FOLDER as RESULTS
from shardwright.core.checks import drafts
from shardwright.core.engines.engines import ENGINES
from shardwright.core.findings.codes import TOO_LARGE
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.resolution.mesh_sizes import mesh_text
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.price import price
from shardwright.cost.stages import with_unit_costs
from shardwright.search.searching import Outcome, Search
from shardwright.search.solving import Solver
from shardwright.search.space import Free, TriedPolicy, space_of
from shardwright.search.space.settings import tried_schedules

FILE = RESULTS / "search_experts.json"
PAGE = FOLDER.parent.parent / "docs" / "search.md"
BEGIN, END = "<!-- experts -->", "<!-- end of experts -->"
KEPT = 10
NEAR = 1.1
"""A layout is near the best if its step takes at most so many times as long."""

REACHED = 0.99
"""A search has reached the experts' layout if their step takes at least this share of the best that it found."""


def experts() -> tuple[Published, ...]:
    """Published steps with other models, layouts or chips each, those of the largest machines last."""
    folders = (FOLDER / "fresh", FOLDER / "later")
    steps = [*published(), *(step for folder in folders for step in steps_of(folder))]
    by_layout: dict[object, Published] = {}
    for step in steps:
        words = step.arguments
        chips = words[words.index("--chips") + 1].partition("+")[0]
        mesh = words[words.index("--mesh") + 1] if "--mesh" in words else ""
        if "num_layers" not in step.plan:
            by_layout.setdefault((step.model, chips, mesh), step)
    return tuple(by_layout.values())


def compared(step: Published, budget_s: float) -> dict[str, Any]:
    """What the plan says of an expert's layout, and what a search of the same step has."""
    asked = typed(step)
    request, machine = asked.request, asked.machine
    assert machine is not None
    if request.schedule in tried_schedules(ENGINES["torch"]):
        request = replace(request, engine="torch")
    about = {
        "model": request.table.name,
        "machine": machine.text,
        "source": step.source,
        "layout": request.layout.name,
        "engine": request.engine,
        "budget_s": budget_s,
    }
    try:
        plan = _plan(request, machine)
    except (FindingsError, InputError) as error:
        return {**about, "refused": str(error).splitlines()[0]}
    codes = {draft.finding.code for draft in drafts(plan) if draft.finding.severity == "error"}
    about |= {
        "mesh": mesh_text({axis: size for axis, size in plan.mesh.shape.items() if size > 1}),
        "errors": sorted(codes),
        "seconds": None if plan.step is None else plan.step.seconds,
    }
    if plan.step is None:
        return about
    outcome, solver = _search(request, machine, budget_s)
    about |= {"priced": outcome.priced, "complete": outcome.least_seconds is None}
    if not outcome.answers:
        return about
    first = outcome.answers[0]
    best = _plan(solver.requested(first), machine)
    faster = sum(answer.seconds < plan.step.seconds for answer in outcome.answers)
    return about | {
        "best": first.arrangement.key,
        "best_setting": first.setting.text,
        "best_seconds": first.seconds,
        "ratio": plan.step.seconds / first.seconds,
        "faster": faster,
        "within_first": faster < KEPT,
        "loses_by": _loss(plan, best),
    }


def _plan(request: Request, machine: Machine) -> Plan:
    return price(resolve(with_unit_costs(request, machine)), machine)


def _search(request: Request, machine: Machine, budget_s: float) -> tuple[Outcome, Solver]:
    free = Free(policies=(TriedPolicy(text=request.remat),), precisions={"": request.precision})
    # Which layers a stage has is of the experts' stages: a search shares them out by their work.
    request = replace(request, stages=None)
    solver = Solver(request=request, machine=machine, free=free)
    search = Search(solver, space_of(request, machine), keep=KEPT, budget_s=budget_s)
    return search.run(), solver


def _loss(plan: Plan, best: Plan) -> str:
    """The part of the step that is longer by the most."""
    if plan.step is None or best.step is None:
        return ""
    longer = {
        "products and passes over memory": plan.step.compute_seconds - best.step.compute_seconds,
        "waiting of stages": plan.step.idle_seconds - best.step.idle_seconds,
        "communication": plan.step.exposed_seconds - best.step.exposed_seconds,
        "copies to the host": plan.step.host_exposed_seconds - best.step.host_exposed_seconds,
    }
    part = max(longer, key=lambda name: longer[name])
    return f"{part}, {longer[part]:.3g} s"


def _saved() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the page."""
    legal = [row for row in rows.values() if not set(row.get("errors", ["refused"])) - {TOO_LARGE}]
    fitting = [row for row in legal if not row["errors"]]
    timed = [row for row in fitting if row.get("ratio") is not None]
    reached = [row for row in timed if row["ratio"] >= REACHED]
    near = [row for row in reached if row["within_first"] or row["ratio"] <= NEAR]
    budgets = sorted({f"{row['budget_s']:g}" for row in rows.values()})
    certain = sum(row.get("complete", False) for row in timed)
    yield (
        f"{len(rows)} published layouts, each with a search of {' or '.join(budgets)} s in one process on a machine with other load. {len(legal)} have "
        f"no error but memory, and {len(fitting)} fit. Of these a search found an answer for {len(timed)}. For {len(reached)} it is as fast as the "
        f"experts' layout or faster, and {len(near)} of the experts' are then among its first {KEPT} or take at most {NEAR - 1:.0%} longer. "
        f"Only {certain} of the {len(timed)} searches were complete: the others say what was found, not what is the best."
    )
    yield ""
    yield "| model | chips | the experts' layout | s | errors | best that was found | s | ratio | faster ones | complete | it loses by |"
    yield "|---|---|---|---:|---|---|---:|---:|---:|---|---|"
    for row in sorted(rows.values(), key=lambda row: (row["model"], row["machine"], str(row.get("mesh")))):
        seconds, best, ratio = row.get("seconds"), row.get("best_seconds"), row.get("ratio")
        is_near = ratio is not None and (row["within_first"] or ratio <= NEAR)
        cells = (
            row["model"],
            row["machine"],
            row.get("mesh", row.get("refused", "")),
            "" if seconds is None else f"{seconds:.3g}",
            " ".join(row.get("errors", ())),
            row.get("best", ""),
            "" if best is None else f"{best:.3g}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if ratio is None else f"{row['faster']}{'' if row['within_first'] else ' or more'}",
            "" if ratio is None else "yes" if row["complete"] else "no",
            "" if ratio is None or is_near else row["loses_by"],
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Compare some more, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a search")
    parser.add_argument("--most", type=int, default=1000, help="steps to compare in this run")
    parser.add_argument("--only", default="", metavar="TEXT", help="only steps with this in their names")
    parser.add_argument("--page", action="store_true", help="write the table of docs/search.md")
    options = parser.parse_args()
    if options.page:
        write_page(PAGE)
        return
    os.nice(10)
    rows = _saved()
    waiting = [step for step in experts() if options.only in step.name and step.name not in rows]
    for step in waiting[: options.most]:
        rows[step.name] = compared(step, options.budget)
        RESULTS.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(step.name, rows[step.name].get("ratio"), rows[step.name].get("errors"), flush=True)


def write_page(page: Path) -> None:
    """Put the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(table(_saved()))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
