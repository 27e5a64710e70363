"""Processes that save again and again and are killed at random moments, and what must be true after each.

A program, so that every process that saves is a fork of one that has imported the store and NumPy and nothing else:

    python -m tests.checkpoint.killing OUT [--writers 1] [--kills 30] [--seed 0] [--fault none]

``--fault`` breaks the store on purpose. Ends with an AssertionError if a kill left an invalid state; otherwise
prints the number of kills for each phase of a save.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from shardwright.checkpoint import latest, open_checkpoint, verify
from shardwright.checkpoint.folder import on_disk
from shardwright.checkpoint.folder.directory import committed, leftovers
from shardwright.checkpoint.folder.names import step_directory, step_of
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import FILE_NAME
from shardwright.checkpoint.writing import retention
from shardwright.checkpoint.writing import save as saves
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import State, point, random_array, random_partition, same_bits

KEEP = 2
FILE_BYTES = 1 << 16
"""A data file ends before it grows larger than this, so that a save of each writer has several."""
PATIENCE_S = 60.0
FORKED = get_context("fork")
ENDED = (EOFError, OSError, CheckpointError)
"""The errors in a process whose peer was killed."""

SHAPES = {
    "embedding": ((256, 64), np.dtype(np.float32)),
    "layers/kernel": ((4, 64, 64), np.dtype(bfloat16)),
    "moments.first/kernel": ((4, 64, 64), np.dtype(np.float32)),
    "experts": ((8, 16, 32), np.dtype(np.float16)),
    "scale": ((64,), np.dtype(np.float32)),
    "step": ((), np.dtype(np.int32)),
}


@cache
def state_of(step: int) -> State:
    """The state at a step: random bits, including NaNs, different at every step."""
    rng = np.random.default_rng(step)
    arrays = {name: random_array(rng, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    boxes = {name: random_partition(rng, Box.whole(shape), 5) for name, (shape, _) in SHAPES.items()}
    return State(arrays=arrays, boxes=boxes)


def save_until_killed(out: Path, step: int, others: list[Connection], done: Connection) -> None:
    """Process 0 of a run that saves every step from ``step`` on and sends each saved step to ``done``."""
    try:
        while True:
            save_together(out, step, others)
            done.send(step)
            step += 1
    except ENDED:
        return


def save_together(out: Path, step: int, others: list[Connection]) -> None:
    state = state_of(step)
    with saves.saving(out, step) as save:
        for other in others:
            other.send((step, save.name))
        writers = len(others) + 1
        saves.write_part(save, state.infos, state.owned[::writers], max_file_bytes=FILE_BYTES)
        for other in others:
            other.recv()
        saves.commit(save, point(step), num_processes=writers, keep=KEEP)


def help_until_killed(out: Path, process: int, writers: int, first: Connection) -> None:
    """Another process of that run; it ends with process 0."""
    try:
        while True:
            step, name = first.recv()
            state, save = state_of(step), saves.join_save(out, step, name)
            owned = state.owned[process::writers]
            saves.write_part(save, state.infos, owned, process=process, max_file_bytes=FILE_BYTES)
            first.send(step)
    except ENDED:
        return


class Run:
    """The processes of a run, from their start on."""

    def __init__(self, out: Path, step: int, writers: int) -> None:
        pairs = [FORKED.Pipe() for _ in range(writers - 1)]
        self.done, reported = FORKED.Pipe(duplex=False)
        work = [lambda: save_until_killed(out, step, [ours for ours, _ in pairs], reported)]
        work += [
            lambda process=process: help_until_killed(out, process, writers, pairs[process - 1][1])
            for process in range(1, writers)
        ]

        def alone(process: int) -> None:
            # A pipe end that a living process also holds never reads as closed.
            for number, (zero, other) in enumerate(pairs, 1):
                if process > 0:
                    zero.close()
                if process != number:
                    other.close()
            if process > 0:
                reported.close()
            work[process]()

        self.processes = [FORKED.Process(target=alone, args=(process,)) for process in range(writers)]
        for process in self.processes:
            process.start()
        for end in [reported, *(end for pair in pairs for end in pair)]:
            end.close()

    def kill(self, which: list[int]) -> int | None:
        """SIGKILL for some of the processes, after which the others end. Returns the last step reported as saved."""
        assert all(process.is_alive() for process in self.processes), "a process ended before one was killed"
        for process in which:
            pid = self.processes[process].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode is not None, "a process waits for one that was killed"
        last = None
        try:
            while True:
                last = self.done.recv()
        except EOFError:
            return last


def assert_intact(out: Path, least: int) -> int:
    """The newest checkpoint's step, ``least`` or the next. Every directory with a checkpoint's name is one, bit for bit."""
    checked = verify(out)
    assert checked["ok"], checked
    found = latest(out)
    assert found.passed_over == (), found.passed_over
    assert found.checkpoint is not None
    step = found.checkpoint.point.step
    assert least <= step <= least + 1, f"step {step} is the newest, after {least} was saved"
    for directory in committed(out):
        checkpoint = open_checkpoint(directory)
        assert checkpoint.point == point(step_of(directory) or 0)
        expected = state_of(checkpoint.point.step).arrays
        assert checkpoint.tensors.keys() == expected.keys()
        for name, array in expected.items():
            assert same_bits(checkpoint.read_box(name), array), (directory, name)
    for directory in leftovers(out):
        try:
            open_checkpoint(directory)
        except CheckpointError:
            continue
        raise AssertionError(f"{directory} passes for a checkpoint")
    return step


def landed(out: Path) -> str:
    """In which phase of a save the kill was, as far as the directory shows."""
    for leftover in leftovers(out):
        if ".deleting-" in leftover.name:
            return "deleting an old one"
        return "before the rename" if (leftover / FILE_NAME).exists() else "writing"
    return "before deleting an old one" if len(committed(out)) > KEEP else "elsewhere"


def duration_of_a_save(out: Path, writers: int) -> float:
    """Seconds, by a run that saves the first steps there and is then killed."""
    run = Run(out, 1, writers)
    run.done.recv()
    start, steps = time.perf_counter(), 4
    for _ in range(steps):
        assert run.done.poll(PATIENCE_S)
        run.done.recv()
    duration = (time.perf_counter() - start) / steps
    run.kill(list(range(writers)))
    return duration


def break_the_store(fault: str) -> None:
    """Faults that this program must find."""
    if fault == "renamed before it is whole":
        commit = saves.commit

        def renamed_first(save: saves.Save, *arguments: Any, **options: Any) -> Path:
            final = step_directory(save.out, save.step)
            os.rename(save.directory, final)
            return commit(replace(save, directory=final), *arguments, **options)

        saves.commit, on_disk._refuse_to_overwrite = renamed_first, lambda _: None
    elif fault == "deleted under its name":
        retention.delete = shutil.rmtree
    else:
        assert fault == "none", fault


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", default="none")
    given = parser.parse_args()
    break_the_store(given.fault)
    moments = random.Random(given.seed)
    duration = duration_of_a_save(given.out, given.writers)
    newest = latest(given.out).checkpoint
    assert newest is not None
    step = newest.point.step
    phases: Counter[str] = Counter()
    for _ in range(given.kills):
        run = Run(given.out, step + 1, given.writers)
        time.sleep(moments.uniform(0, 3 * duration))
        everyone = list(range(given.writers))
        last_saved = run.kill(everyone if moments.random() < 0.5 else [moments.choice(everyone)])
        phases[landed(given.out)] += 1
        step = assert_intact(given.out, step if last_saved is None else last_saved) + 1
        save_together(given.out, step, [])
        assert leftovers(given.out) == ()
        assert len(committed(given.out)) == KEEP
        assert assert_intact(given.out, step) == step
    print(
        f"a save takes {1000 * duration:.0f} ms",
        *(f"{count} {where}" for where, count in phases.most_common()),
        sep="; ",
    )


if __name__ == "__main__":
    main()
