"""A training run, on any engine: it reads text and writes metrics and checkpoints, and can be stopped and resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

from shardwright.checkpoint import DamagedError, open_checkpoint
from shardwright.checkpoint.folder.names import checkpoints_directory
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.escaped import escaped
from shardwright.core.plan.plan import Plan
from shardwright.runs.engine import Engine, OpenFolder, Weights
from shardwright.runs.fingerprint import run_fingerprint, shared_by_processes
from shardwright.runs.hold import Hold, held
from shardwright.runs.loop import Loop, tokens_seen
from shardwright.runs.metrics.journal import board_writer
from shardwright.runs.partial import with_average
from shardwright.runs.processes.group import Group, must_agree
from shardwright.runs.processes.rendezvous import Connection, joined
from shardwright.runs.resuming import Beginning, beginning, changes_of, older, open_weights, record_weights
from shardwright.runs.source import open_source, published_folders
from shardwright.storage.url import Place
from shardwright.training.changes import Change, other_rows, recorded
from shardwright.training.effects import effects
from shardwright.training.optimizer import optimizer_options
from shardwright.training.options import Listener, RunOptions, RunOutcome, Silent
from shardwright.training.published import (
    OTHER_FILES,
    TOKENIZER,
    TOKENIZER_FILES,
    copied,
    found,
    keep_tokenizer,
    published_folder,
    published_with,
)

MakeEngine = Callable[[RunOptions, Plan], Engine]
"""Raises FindingsError for a plan that the engine does not run, InputError for missing devices. Allocates nothing."""


def run(
    options: RunOptions,
    plan: Plan,
    shown: Listener | None,
    *,
    connection: Connection,
    make_engine: MakeEngine,
    open_folder: OpenFolder | None = None,
) -> RunOutcome:
    """Train by the plan, from the start or from a checkpoint under ``options.out``. The folder is locked meanwhile.

    ``open_folder``: what opens ``options.weights`` where they are in another format than a checkpoint.

    One of several processes joins the others first. Only process 0 locks the folder, reports to ``shown`` and writes
    metrics.

    Raises FindingsError for a plan with errors. Raises InputError, before anything is allocated or written, for text that cannot be used, too few devices, a folder
    that another run holds or that already has a run, a checkpoint that this run cannot continue, or processes with
    different options; RunError for a loss that is not finite.
    """
    processes = options.processes
    if shown is None or (processes is not None and processes.index != 0):
        shown = Silent()
    refused = hold = None
    with ExitStack() as folder:
        try:
            if processes is None or processes.index == 0:
                hold = folder.enter_context(held(options.out, shown))
        except InputError as error:
            if processes is None:
                raise
            refused = str(error)
        if processes is not None:
            shown.say(f"{processes.count} processes meet at {processes.coordinator} ({processes.found})")
            shown.doing("waiting for the others")
        with joined(processes, connection, shown, refused) as group:
            return _run(options, plan, shown, group, make_engine, open_folder, hold)


def _run(
    options: RunOptions,
    plan: Plan,
    shown: Listener,
    group: Group,
    make_engine: MakeEngine,
    open_folder: OpenFolder | None = None,
    hold: Hold | None = None,
) -> RunOutcome:
    writer = board_writer() if options.tensorboard else None
    engine = make_engine(options, plan)
    shown.doing(f"reading {options.data}")
    source = open_source(options, plan)
    same = run_fingerprint(options, plan, source)
    start = _chosen(group, "where the run begins", lambda: beginning(options, same, shown), options)
    weights = None
    if start.checkpoint is None and options.weights is not None:
        weights = open_weights(options.weights, options, plan, same, open_folder, shown)
    must_agree(
        group, {**same, **shared_by_processes(options, plan, start.step, engine.versions)}, "before the first step"
    )
    shown.say(
        f"text: {source.corpus.num_tokens:,} tokens of {source.corpus.num_documents:,} documents "
        f"(tokenizer: {source.corpus.tokenizer}), {len(source.rows):,} rows of {plan.request.length:,}"
    )
    if weights is None:
        first, start = _begun(engine, options, plan, start, same, group, shown)
    else:
        first = _begun_with(weights, engine, options, group, shown)
    if group.index == 0 and options.tokenizer is not None:
        _keep_tokenizer(options.tokenizer, options, shown)
    begun = weights if start.checkpoint is None else start.checkpoint
    changes, next_row = _changed(start, same, options, shown)
    loop = Loop(
        options=options,
        plan=plan,
        engine=engine,
        source=source,
        fingerprint=same,
        published={} if begun is None else published_with(begun.point.metadata),
        changes=changes,
        skipped=start.skipped,
        shown=shown,
        writer=writer,
        group=group,
        hold=hold,
        tokens_seen=0 if start.checkpoint is None else tokens_seen(start.checkpoint.point.metadata),
    )
    if start.checkpoint is None:
        return loop.go(first, 0, None)
    return loop.go(first, next_row, start.checkpoint.directory)


def _changed(
    start: Beginning, same: Mapping[str, Any], options: RunOptions, shown: Listener
) -> tuple[tuple[Change, ...], int]:
    """The changes of a run until now, and the next row. Every process finds the same ones."""
    if start.checkpoint is None:
        return (), 0
    point, new = start.checkpoint.point, changes_of(start.checkpoint, same, options)
    next_row = 0 if other_rows(new) else point.data_position
    for line in effects(new, options.change, same, optimizer_options(options), step=point.step, first_row=next_row):
        shown.say(line)
    return (*recorded(point.metadata), *new), next_row


def _chosen(group: Group, name: str, choose: Callable[[], Beginning], options: RunOptions) -> Beginning:
    """Where the run begins, the same in all processes: process 0 chooses, and it alone verifies every file of a checkpoint.

    The others open the same one, and verify what they read of it.
    """
    chosen = choose() if group.index == 0 else None
    directory = None if chosen is None or chosen.checkpoint is None else chosen.checkpoint.directory.name
    # Process 0 is the first to give a value.
    of_first = group.exchange(name, directory)[0].value
    if chosen is not None:
        return chosen
    if of_first is None:
        return Beginning(checkpoint=None, skipped={})
    return Beginning(
        checkpoint=open_checkpoint(checkpoints_directory(options.saved_under) / of_first, all_files=False), skipped={}
    )


def _begun_with(weights: Weights, engine: Engine, options: RunOptions, group: Group, shown: Listener) -> int:
    """Read the weights of a checkpoint and return the number of steps done, which is 0.

    Every process raises InputError if any process finds damage.
    """
    shown.doing(f"reading weights of {weights.directory}")
    damage, done = None, 0
    try:
        done = engine.begin(weights, options.seed, weights_only=True)
    except DamagedError as error:
        damage = str(error)
    everywhere = group.exchange("reading weights", damage)
    damage = next((one.value for one in everywhere if one.value is not None), None)
    if damage is not None:
        raise InputError(f"--weights: {damage}")
    shown.say(f"weights from {weights.directory} (step {weights.point.step:,} of {weights.point.model})")
    if group.index == 0:
        assert options.weights is not None
        record_weights(options.out, options.weights)
        _keep_files(weights.directory, options, shown)
    return done


def _keep_files(weights: Place, options: RunOptions, shown: Listener) -> None:
    """Copy the files that were published with the weights to the run's folder, and to that of its checkpoints: a resumed run and an
    export find them there.

    A tokenizer that the run does not use is left out. Raises InputError where they cannot be copied.
    """
    source = published_folder(weights)
    names = found(source, (*(TOKENIZER_FILES if options.tokenizer is None else ()), *OTHER_FILES))
    if names:
        for target in published_folders(options):
            with copied(source, target, names):
                shown.say(f"copied to {target}: {', '.join(names)}")


def _keep_tokenizer(tokenizer: Place, options: RunOptions, shown: Listener) -> None:
    """Copy a tokenizer that was given to the same folders, for the same reasons. Raises InputError where it cannot be copied."""
    for target in published_folders(options):
        if keep_tokenizer(tokenizer, target):
            shown.say(f"copied to {target}: {TOKENIZER}")


def _begun(
    engine: Engine,
    options: RunOptions,
    plan: Plan,
    start: Beginning,
    same: Mapping[str, Any],
    group: Group,
    shown: Listener,
) -> tuple[int, Beginning]:
    """The number of steps done, and where the run really begins: at a checkpoint that no process finds damaged.

    Each process verifies the elements that it needs against their digests as it reads them. It reads no others.
    """
    for attempt in count(1):
        if start.checkpoint is None:
            shown.doing("making initial values")
            return engine.begin(None, options.seed), start
        shown.doing(f"reading {start.checkpoint.directory}")
        first, damage = 0, None
        try:
            first = engine.begin(with_average(start.checkpoint, plan), options.seed)
        except DamagedError as error:
            damage = str(error)
        everywhere = group.exchange(f"reading a checkpoint, try {attempt}", damage)
        damage = next((one.value for one in everywhere if one.value is not None), None)
        if damage is None:
            point = start.checkpoint.point
            shown.say(f"resumed from {start.checkpoint.directory} (layout {escaped(point.layout_name)})")
            return first, start
        choose = partial(older, options, start, damage, same, shown)
        start = _chosen(group, f"an older checkpoint, try {attempt}", choose, options)
        must_agree(group, {"goes on from": start.step}, f"after damage was found, try {attempt}")
    raise AssertionError
