"""`shardwright search`: the fastest layouts of a model on its chips, that fit and that its engine runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from shardwright.cli.searching.compiling import Compilation, compiled_rows, require_compiler
from shardwright.cli.searching.rows import Row, rows_of
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import typed_request
from shardwright.cli.typed.values import moves
from shardwright.cli.typed.verbs import SearchVerb
from shardwright.core.findings.codes import TOO_LARGE
from shardwright.core.findings.errors import INTERRUPTED, InputError
from shardwright.core.findings.thresholds import MEMORY_WARNING_SHARE
from shardwright.core.layout.layout import ATTENTION_MOVES
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.steps.step import HOST_RATE
from shardwright.files.replaced import replace_text
from shardwright.layouts import load_layout, load_recipe, preset_names
from shardwright.search.answers import answered
from shardwright.search.larger import smallest_that_fits
from shardwright.search.saved import SearchFile
from shardwright.search.searching import Outcome, Progress, Search, processes_here
from shardwright.search.solving import Solver
from shardwright.search.space.policies import TriedPolicy, policies_of
from shardwright.search.space.settings import LOSS_CHUNKS, Free
from shardwright.search.space.space import space_of

STATES: tuple[Mapping[str, str], ...] = (
    {},
    {"moments_dtype": "bfloat16"},
    {"moments_dtype": "bfloat16", "weights_dtype": "bfloat16"},
)
"""Dtypes of what rests: the next ones are tried where nothing fits and they were not typed."""

SEARCHED = ("mesh", "stages", "devices")
"""Options of a plan whose value is what a search finds."""

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search has had as its input, and has found. ``options``: with what was chosen for all of its answers, which ``chosen`` names.
    ``within``: the share by which something else may be faster than the first. ``larger``: where nothing fits, the smallest machine of these chips on which something does."""

    options: PlanOptions
    chosen: Mapping[str, str]
    machine: Machine
    solver: Solver
    layouts: int
    outcome: Outcome
    seconds: float
    within: float
    larger: Machine | None = None


def run_search(verb: SearchVerb) -> int:
    """Print the answers. Returns 1 if there is none, and 130 if an interrupt ended the compiling."""
    verb = with_named_model(verb, has_findings=False)
    if verb.keep < 1:
        raise InputError(f"--keep is {verb.keep}, and must be at least 1.")
    if not 0 <= verb.within < 100:
        raise InputError(f"--within is {verb.within:g}, and must be a percentage from 0 to below 100.")
    _check_compile(verb)
    if verb.like is not None:
        from shardwright.cli.searching.like import run_like

        return run_like(verb)
    _check(verb)
    presets = [load_layout(name) for name in preset_names()]
    file = None if verb.out is None else SearchFile.of(verb.out, f"{version('shardwright')} {_without_amounts(verb)!r}")
    if verb.compile is not None:
        require_compiler(verb.plan)
    # This loads rich, which no other part of the verb needs.
    from shardwright.report.search_progress import compiling_progress, search_progress

    with search_progress(verb.budget) as report:
        searched = _searched(verb, file, report)
    folder = None if verb.out is None else verb.out.with_suffix("")
    answers = answered(searched.solver, searched.outcome.answers)
    rows = rows_of(answers, verb.model, searched.options, presets, folder)
    compilation: Compilation | None = None
    if verb.compile is not None and rows:
        with compiling_progress() as report_compiling:
            compilation = compiled_rows(
                rows,
                verb.compile,
                verb.model,
                memory={} if file is None else file.compiled,
                save=(lambda: None) if file is None else file.write,
                budget_s=verb.compile_budget,
                report=report_compiling,
            )
        rows = compilation.rows
    value = _json(searched, rows, compilation)
    if file is not None and folder is not None:
        _write(file, folder, rows, value)
    if verb.plan.json:
        write_json(value)
    else:
        from shardwright.report.search_view import search_view

        write_view(search_view(value, verb.out), sys.stdout)
    if compilation is not None and compilation.ended == "interrupted":
        return INTERRUPTED
    return 0 if rows else 1


def _without_amounts(verb: SearchVerb) -> SearchVerb:
    """What a search is of: not how long it takes, nor how much of it is shown or compiled, nor how."""
    return replace(
        verb,
        budget=0.0,
        keep=0,
        within=0.0,
        out=None,
        compile=None,
        compile_budget=0.0,
        plan=replace(verb.plan, json=False),
    )


def _check_compile(verb: SearchVerb) -> None:
    if verb.compile is None:
        return
    if verb.like is not None:
        raise InputError(
            "--compile compiles the answers of a search, and --like shows single changes of a layout. Leave one out; "
            "`shardwright compile` takes the options of a change."
        )
    if verb.compile < 1:
        raise InputError(f"--compile is {verb.compile}, and must be at least 1.")
    if verb.compile > verb.keep:
        raise InputError(
            f"--compile is {verb.compile}, and --keep is {verb.keep}: only answers that are kept can be compiled. "
            f"Give --keep {verb.compile} or more."
        )


def _check(verb: SearchVerb) -> None:
    options = verb.plan
    if options.chips is None:
        raise InputError("search needs --chips, as h100:4x8: it orders layouts by the time of a step.")
    for name in SEARCHED:
        if getattr(options, name) is not None:
            raise InputError(f"--{name} is what search finds. Leave it out; `shardwright plan` takes it.")
    if verb.out is not None and verb.out.suffix != ".json":
        raise InputError(
            f"--out {verb.out}: its name must end in .json. Layouts are written to a folder of the name before it."
        )


def _searched(verb: SearchVerb, file: SearchFile | None, report: Callable[[Progress], None]) -> Searched:
    """Searches with the dtypes that were typed or are the default and a reserve of memory. Where nothing fits, with narrower dtypes, and at last
    without the reserve; each in half of the time that is left as long as others follow."""
    began, searched = monotonic(), None
    states = [state for state in STATES if all(getattr(verb.plan, name) is None for name in state)]
    tries = [(state, share) for share in (MEMORY_WARNING_SHARE.value, 1.0) for state in states]
    for number, (state, share) in enumerate(tries):
        left = max(0.0, verb.budget - (monotonic() - began))
        budget = left if number == len(tries) - 1 else left / 2
        searched = _with_state(verb, file, state, share, (left, budget), report)
        outcome = searched.outcome
        # Memory helps nothing that has an error.
        if outcome.answers or (outcome.least_seconds is None and TOO_LARGE not in outcome.ended):
            break
    assert searched is not None
    outcome = searched.outcome
    nothing = not outcome.answers and outcome.least_seconds is None and TOO_LARGE in outcome.ended
    return replace(
        searched,
        seconds=monotonic() - began,
        larger=smallest_that_fits(searched.solver) if nothing else None,
    )


def _with_state(
    verb: SearchVerb,
    file: SearchFile | None,
    state: Mapping[str, str],
    memory_share: float,
    budgets: tuple[float, float],
    report: Callable[[Progress], None],
) -> Searched:
    """``budgets``: seconds, and those after which it ends if nothing that fits has been priced."""
    options = replace(verb.plan, **state)
    precision = options.precision
    typed = typed_request(
        verb.model, "fsdp", replace(options, precision=None if precision == AUTO else precision, move=None)
    )
    machine = typed.machine
    if machine is None or machine.numbers is None:
        raise InputError(f"--chips {options.chips}: simulated devices have no speed. Give a kind of chip, as h100:4x8.")
    chosen = {f"--{name.replace('_', '-')}": value for name, value in state.items()}
    request = typed.request
    if options.batch is None:
        rows = -(-max(request.batch, machine.num_devices) // machine.num_devices) * machine.num_devices
        request, chosen["--batch"] = replace(request, batch=rows), str(rows)
    if options.length is None:
        chosen["--length"] = str(request.length)
    free = _free(options, request, machine)
    solver = Solver(request=request, machine=machine, free=free, memory_share=memory_share)
    space = space_of(request, machine)
    name = " ".join([f"{memory_share:g}", *state.values()])
    search = Search(
        solver,
        space,
        keep=verb.keep,
        within=verb.within / 100,
        budget_s=budgets[0],
        without_answer_s=budgets[1],
        processes=processes_here(),
        memory={} if file is None else file.memory_of(name),
        save=(lambda: None) if file is None else file.save,
        report=report,
    )
    try:
        outcome = search.run()
    finally:
        if file is not None:
            file.write()
    return Searched(
        options=replace(options, batch=request.batch, length=request.length, move=None),
        chosen=chosen,
        machine=machine,
        solver=solver,
        layouts=len(space.arrangements) + sum(space.ended.values()),
        outcome=outcome,
        seconds=0.0,
        within=verb.within / 100,
    )


def _free(options: PlanOptions, request: Request, machine: Machine) -> Free:
    """What was not typed."""
    moved = {} if options.move is None else moves(options.move)
    to_host = machine.numbers is not None and HOST_RATE in machine.numbers.numbers
    policies = (
        (TriedPolicy(text=request.remat),) if options.remat is not None else policies_of(request.table, to_host=to_host)
    )
    return Free(
        policies=policies,
        microbatches=options.microbatches,
        loss_chunks=LOSS_CHUNKS if options.loss_chunks is None else (options.loss_chunks,),
        schedules=None if options.schedule is None else (options.schedule,),
        moves_of_attention=ATTENTION_MOVES if "attention" not in moved else (moved["attention"],),
        moves_of_experts=None if "moe" not in moved else (moved["moe"],),
        precisions=_precisions(options.precision, request),
    )


def _precisions(name: str | None, request: Request) -> Mapping[str, Recipe | None]:
    """The recipe that was typed; with ``auto`` none and every recipe by name."""
    if name is None:
        return {"": None}
    if name != AUTO:
        return {name: request.precision}
    return {"": None} | {preset: load_recipe(preset) for preset in PRESETS}


def _write(file: SearchFile, folder: Path, rows: Sequence[Row], value: Mapping[str, object]) -> None:
    """The result to the file, and the layouts that are no presets to the folder."""
    file.write(value)
    files = {row.name: row.file for row in rows if row.file is not None}
    if files:
        folder.mkdir(exist_ok=True)
    for name, text in files.items():
        replace_text(folder / name, text)


def _json(searched: Searched, rows: Sequence[Row], compilation: Compilation | None) -> dict[str, object]:
    outcome, request = searched.outcome, searched.solver.request
    nearest = outcome.nearest
    return {
        "model": request.table.name,
        "machine": searched.machine.text,
        "batch": request.batch,
        "length": request.length,
        "engine": request.engine,
        "chosen": dict(searched.chosen),
        "memory_share": searched.solver.memory_share,
        "layouts": searched.layouts,
        "priced": outcome.priced,
        "seconds": searched.seconds,
        "within": searched.within,
        "complete": outcome.least_seconds is None,
        "least_seconds_left": outcome.least_seconds,
        "ended": dict(sorted(outcome.ended.items())),
        "answers": [row.to_json() for row in rows],
        **({} if compilation is None else {"compile": compilation.to_json()}),
        **({} if rows or compilation is not None else {"nearest": None if nearest is None else _nearest(searched)}),
        **({} if searched.larger is None else {"smallest_machine": searched.larger.text}),
    }


def _nearest(searched: Searched) -> dict[str, object]:
    """What misses the memory by the least."""
    node = searched.outcome.nearest
    assert node is not None
    limit = searched.solver.limit_bytes
    return {
        "layout": node.arrangement.layout.name,
        "mesh": dict(node.arrangement.sizes),
        "needed_bytes": node.bytes_per_device,
        "usable_bytes": limit,
        "missing_bytes": node.bytes_per_device - limit,
    }
