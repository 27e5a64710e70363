"""A training run: text in; metrics, checkpoints and a progress bar out; stopped and resumed exactly, on any engine."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.plan import Plan
from shardwright.core.run import Listener, RunOptions, RunOutcome, Silent
from shardwright.runs.engine import Engine
from shardwright.runs.group import Group, must_agree
from shardwright.runs.journal import board_writer, require_folder
from shardwright.runs.loop import Loop
from shardwright.runs.meeting import Connection, joined
from shardwright.runs.resuming import checkpoint_to_resume
from shardwright.runs.source import open_source
from shardwright.runs.told import told, told_to_all

MakeEngine = Callable[[RunOptions, Plan], Engine]
"""Raises InputError for a plan which the engine does not run and for devices that are not there. Allocates nothing."""


def run(
    options: RunOptions, plan: Plan, shown: Listener | None, *, connection: Connection, make_engine: MakeEngine
) -> RunOutcome:
    """Train as the plan says, from the start or from the newest checkpoint under ``options.out``.

    Where it is one of several processes, it meets the others first; only process 0 tells ``shown`` and writes metrics.

    Raises InputError, before anything is allocated or written, for text that cannot be used, too few devices, a folder
    that holds another run, a checkpoint that this run cannot continue, or processes that were not told the same; RunError
    for a loss that is not finite.
    """
    processes = options.processes
    if shown is None or (processes is not None and processes.index != 0):
        shown = Silent()
    if processes is not None:
        shown.say(f"{processes.count} processes meet at {processes.coordinator} ({processes.found})")
        shown.doing("waiting for the others")
    with joined(processes, connection) as group:
        return _run(options, plan, shown, group, make_engine)


def _run(options: RunOptions, plan: Plan, shown: Listener, group: Group, make_engine: MakeEngine) -> RunOutcome:
    require_folder(options.out)
    writer = board_writer() if options.tensorboard else None
    engine = make_engine(options, plan)
    shown.doing(f"reading {options.data}")
    source = open_source(options, plan)
    same = told(options, plan, source)
    checkpoint = checkpoint_to_resume(options, same, shown)
    must_agree(group, {**same, **told_to_all(options, plan, checkpoint, engine.versions)}, "before the first step")
    shown.say(
        f"text: {source.corpus.num_tokens:,} tokens of {source.corpus.num_documents:,} documents "
        f"(tokenizer: {source.corpus.tokenizer}), {len(source.rows):,} rows of {plan.request.length:,}"
    )
    loop = Loop(
        options=options,
        plan=plan,
        engine=engine,
        source=source,
        told=same,
        shown=shown,
        writer=writer,
        group=group,
    )
    if checkpoint is None:
        shown.doing("making initial values")
        return loop.go(engine.begin(None, options.seed), 0, None)
    shown.doing(f"reading {checkpoint.directory}")
    first = engine.begin(checkpoint, options.seed)
    shown.say(f"resumed from {checkpoint.directory} (layout {checkpoint.point.layout_name})")
    return loop.go(first, checkpoint.point.data_position, checkpoint.directory)
