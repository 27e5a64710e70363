"""Asynchronous saves: the state is copied to host memory, and a thread writes the copy.

A step waits for the copy only before it changes the state: what says of its boxes that they last until then is copied while the
step computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from shardwright.checkpoint import (
    CheckpointError,
    Keep,
    OwnedBox,
    RunPoint,
    Save,
    TensorInfo,
    commit,
    committed,
    write_part,
)
from shardwright.checkpoint.folder.directory import steps_at
from shardwright.checkpoint.folder.names import step_directory
from shardwright.checkpoint.format.part import part_name
from shardwright.checkpoint.writing.copies import Copying, HostCopies
from shardwright.checkpoint.writing.save import explained
from shardwright.runs.metrics.records import RunError
from shardwright.runs.processes.group import Exchanging
from shardwright.runs.saving import WithdrawnError, all_or_none, begin_together, save
from shardwright.storage.files import read_regular, sizes_in, system_of, write_durable, write_small
from shardwright.storage.url import Place
from shardwright.training.options import Listener

PATIENCE_S = 120.0
"""How long process 0 waits for the parts of the others while none of their files grows."""
STORE_PATIENCE_S = 1800.0
"""The same in an object store, where a file has no size until all of it is there."""
FIRST_POLL_S, LAST_POLL_S = 0.01, 1.0
MOST_ERROR_BYTES = 1 << 20


class Saver:
    """Saves the states of a run; in the background, if ``asynchronous``. At most one save is in flight: the next one waits.

    ``run``: as of ``checkpoint.saving``. ``others``: no lock of this run keeps other runs from ``out``; it ends where one has saved.

    A context: it is left when the save in flight is complete, or will never be.
    """

    def __init__(
        self,
        out: Place,
        group: Exchanging,
        shown: Listener,
        *,
        keep: Keep,
        asynchronous: bool,
        run: str | None = None,
        others: bool = False,
    ) -> None:
        self._out, self._group, self._shown, self._keep = out, group, shown, keep
        self._asynchronous, self._run = asynchronous, run
        self._copies = HostCopies()
        self._flight: _Flight | None = None
        # What is neither of these nor saved by this run is another's. Process 0 looks.
        self._others = others
        self._known = set(committed(out)) if others and group.index == 0 else set[Place]()

    def save(self, point: RunPoint, infos: Sequence[TensorInfo], boxes: Iterator[OwnedBox]) -> Place:
        """Save a state, or begin to. Returns the path of the checkpoint. Raises CheckpointError, as ``check`` does."""
        if self._others:
            all_or_none(self._group, f"the checkpoint of step {point.step}, alone", self._require_alone)
            self._known.add(step_directory(self._out, point.step))
        if not self._asynchronous:
            return save(self._out, point, infos, boxes, self._group, keep=self._keep, run=self._run)
        if (before := self._flight) is not None:
            started, waits = time.perf_counter(), not before.done
            self.wait()
            if waits:
                self._shown.say(
                    f"the save of step {point.step:,} waited {time.perf_counter() - started:.1f} s for that of step "
                    f"{before.step:,}: with a larger --checkpoint-every it would not"
                )
        with ExitStack() as stack:
            begun = begin_together(self._out, point.step, self._group, stack, self._run)
            copying = self._copies.begin(boxes)
            self._flight = _Flight(begun, point, infos, copying, self._group, self._keep, stack.pop_all())
        return step_directory(self._out, point.step)

    def _require_alone(self) -> None:
        there = committed(self._out, once=True) if self._group.index == 0 else ()
        if others := [step for step in there if step not in self._known]:
            raise CheckpointError(
                f"{others[0]}: another run has saved this step while this one was running. This one ends, and deletes nothing: "
                f"two runs would delete and continue each other's checkpoints. Give each a folder of its own with --checkpoints."
            )

    def wait_copied(self) -> None:
        """Wait until the state in flight is copied. Called before it is updated; a copy that failed is an error of ``check``."""
        if self._flight is not None:
            self._flight.copying.wait()

    def check(self) -> None:
        """Raises the CheckpointError of a save in flight that has failed in this process. Called after every step."""
        if self._flight is not None and self._flight.done:
            self._flight.result()

    def wait_here(self) -> None:
        """Wait until this process has done its part of the save in flight. Nothing is exchanged, and no error is raised."""
        if self._flight is not None:
            self._flight.join()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._flight is None:
            return
        if error is None:
            self.wait()
        elif self._group.count == 1 or isinstance(error, RunError):
            # Such an error occurs in every process. The state in flight is of an earlier step, and good.
            with suppress(CheckpointError):
                self.wait()
        else:
            self._flight.cancel()

    def wait(self) -> None:
        """Wait until the save in flight is complete in all processes. Raises CheckpointError in all if it failed in one."""
        flight = self._flight
        if flight is None:
            return
        self._flight = None
        if not flight.done:
            self._shown.doing(f"writing the checkpoint of step {flight.step:,}")
        all_or_none(self._group, f"the checkpoint of step {flight.step}, commit", flight.result)


class _Flight:
    """One save in flight: a thread of this process writes its boxes; that of process 0 commits when all parts are there."""

    def __init__(
        self,
        save: Save,
        point: RunPoint,
        infos: Sequence[TensorInfo],
        copying: Copying,
        group: Exchanging,
        keep: Keep,
        held: ExitStack,
    ) -> None:
        self.step, self.copying = point.step, copying
        self._path, self._error = save.directory, None
        self._cancelled = threading.Event()

        def commit_all() -> Place:
            _await_parts(save, group.count, self._cancelled.is_set)
            return commit(save, point, num_processes=group.count, keep=keep)

        def work() -> None:
            try:
                with held:
                    try:
                        _write_own(save, infos, copying, group.index)
                        self._path = commit_all() if group.index == 0 else step_directory(save.out, save.step)
                    except BaseException as error:
                        _report_failure(save, group.index, error)
                        raise
            except BaseException as error:
                self._error = error

        # A daemon: an error in the main thread must be able to end the process.
        self._thread = threading.Thread(target=work, name=f"shardwright save {self.step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def result(self) -> Place:
        """The path of the checkpoint, once the thread has ended. Raises its error."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._path

    def cancel(self) -> None:
        """Do not wait for other processes any more. What is incomplete is deleted."""
        self._cancelled.set()
        self._thread.join(PATIENCE_S)


def _write_own(save: Save, infos: Sequence[TensorInfo], copying: Copying, process: int) -> None:
    """Raises WithdrawnError where process 0 has deleted the save meanwhile, CheckpointError for any other failure."""
    try:
        write_part(save, infos, copying.boxes, process=process)
    except CheckpointError as error:
        final = step_directory(save.out, save.step)
        if process and isinstance(error.__cause__, FileNotFoundError) and not steps_at(final).joined(final, save.name):
            raise WithdrawnError(
                f"{final}: process 0 ended this save before process {process} had written its part; its output says why. "
                f"Nothing of it was kept, and earlier checkpoints are as they were."
            ) from error
        raise


def _failure_name(process: int) -> str:
    return f"failed-{process:05d}.txt"


def _report_failure(save: Save, process: int, error: BaseException) -> None:
    """A file for process 0, complete as soon as it exists. Without room for a text it is empty."""
    path = save.directory / _failure_name(process)
    try:
        write_durable(path, (str(error) or type(error).__name__).encode())
    except OSError:
        with suppress(OSError):
            write_small(path, b"")


def _await_parts(save: Save, num_processes: int, cancelled: Callable[[], bool]) -> None:
    """Wait until the part files of all processes are there.

    Raises CheckpointError when a process reports that it failed, or when for ``PATIENCE_S`` no file grows.
    """
    wait, before, since = FIRST_POLL_S, -1, time.monotonic()
    patience = PATIENCE_S if system_of(save.directory).grows else STORE_PATIENCE_S
    while True:
        with explained(save):
            sizes = sizes_in(save.directory)
        missing = [process for process in range(1, num_processes) if part_name(process) not in sizes]
        if not missing:
            return
        final = step_directory(save.out, save.step)
        for process in missing:
            if _failure_name(process) in sizes:
                with explained(save):
                    data = read_regular(save.directory / _failure_name(process), MOST_ERROR_BYTES)
                text = data.decode(errors="replace") or "no room to write it. It is in the output of that process."
                raise CheckpointError(f"{final}: process {process} could not write its part. Its error: {text}")
        if cancelled():
            raise CheckpointError(f"{final}: the run ended before all processes had written their parts.")
        size = sum(sizes.values())
        if size != before:
            before, since = size, time.monotonic()
        elif time.monotonic() - since > patience:
            raise CheckpointError(
                f"{final}: for {patience:.0f} s nothing was written, and the parts of {len(missing)} of {num_processes} "
                f"processes are missing, the first is {missing[0]}."
            )
        time.sleep(wait)
        wait = min(2 * wait, LAST_POLL_S)
