"""Saves a user's own program while it goes on: a thread writes a copy of the state in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from shardwright.checkpoint import Keep
from shardwright.runs.background import Saver
from shardwright.runs.own_program.members import Members
from shardwright.runs.own_program.store import ProgramState, to_write
from shardwright.storage.url import Place, parsed_place
from shardwright.training.options import Silent


class BackgroundSaves:
    """Saves states of a program one after the other. At most one is in flight: the next one waits for it.

    A context: it is left when the save in flight is complete in all processes. Every process makes one, and all call the same
    methods in the same order.
    """

    def __init__(self, folder: Place | str, members: Members, *, keep: Keep) -> None:
        self._members, self._keep = members, keep
        self._saver = Saver(parsed_place(folder), members, Silent(), keep=keep, asynchronous=True)
        # A program that ends, or drops this object, without waiting must not lose its last state.
        weakref.finalize(self, self._saver.wait_here)

    def save_state(self, state: ProgramState, step: int, metrics: Mapping[str, float] | None = None) -> Place:
        """Begin to save a state, and return the directory that it will have.

        The program may change the state afterwards, but for what lasts until its update: it calls ``wait_copied`` before.

        Raises CheckpointError in all processes for a state that cannot be saved, and for a save before that failed.
        """
        found = to_write(state, step, self._members, keep=self._keep, metrics=metrics)
        return self._saver.save(found.point, found.infos, iter(found.boxes))

    def wait_copied(self) -> None:
        """Wait until the state in flight is copied to host memory. It costs nothing where it is; a copy that failed is an error of the next ``check``, ``save`` or ``wait``."""
        self._saver.wait_copied()

    def check(self) -> None:
        """Raises the CheckpointError of a save in flight that has failed in this process. It costs nothing: call it each step."""
        self._saver.check()

    def wait(self) -> None:
        """Wait until the save in flight is complete in all processes. Raises CheckpointError in all if it failed in one."""
        self._saver.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.__exit__(kind, error, trace)
