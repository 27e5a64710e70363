"""The steps of a run's folder, wherever it is: one type with two implementations, ``on_disk.py`` and ``in_store.py``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.storage.system import AnyPlace


class Steps(Protocol[AnyPlace]):
    """What can be done with the steps of one kind of place.

    ``locks``: whether a lock keeps a second save away. Else a run needs a key of its own, by which its leftovers are known.
    """

    locks: bool

    def committed(self, checkpoints: AnyPlace, *, once: bool) -> tuple[AnyPlace, ...]:
        """The checkpoints, newest step first. Their content is not checked. ``once``: one answer of a store is enough, which may leave
        out a step. Raises CheckpointError where a store cannot be read.
        """
        ...

    def leftovers(self, checkpoints: AnyPlace) -> tuple[AnyPlace, ...]:
        """What is of saves and deletions that are running or were killed. Raises CheckpointError where a store cannot be read."""
        ...

    def under_way(self, leftovers: Sequence[AnyPlace]) -> tuple[AnyPlace, ...]:
        """Those whose writer lives, as far as one can see: by its lock, or in a store because it has written not long ago. Changes
        nothing. Raises as ``leftovers``."""
        ...

    def unknown(self, checkpoints: AnyPlace) -> tuple[AnyPlace, ...]:
        """What is next to the checkpoints and has no name of theirs. Nothing reads it. Raises as ``leftovers``."""
        ...

    def has_manifest(self, directory: AnyPlace) -> bool:
        """Raises CheckpointError where a store cannot be read."""
        ...

    def is_gone(self, directory: AnyPlace) -> bool:
        """Whether a step that was listed exists no more. Raises CheckpointError where a store cannot be read."""
        ...

    def beside(self, step: AnyPlace) -> frozenset[AnyPlace]:
        """What is in a step's directory and is not of its checkpoint, and belongs there. Raises OSError."""
        ...

    def delete(self, step: AnyPlace) -> None:
        """Deletes a checkpoint. If killed at any moment, it leaves a complete checkpoint or a recognised leftover. Raises OSError."""
        ...

    def set_aside(self, step: AnyPlace, why: str) -> AnyPlace:
        """Renames a checkpoint so that its step can be saved again. Nothing of it is lost. Returns the new path.

        Raises CheckpointError if it cannot be renamed.
        """
        ...

    def saving(self, final: AnyPlace, run: str | None) -> AbstractContextManager[AnyPlace]:
        """The directory of a new save of a step, after the leftovers of killed ones are deleted. What is in it at the end of the
        block is deleted if it was not published.

        Raises CheckpointError for a step that exists and where another save is running, OSError.
        """
        ...

    def joined(self, final: AnyPlace, name: str) -> AnyPlace | None:
        """The directory of the save of a step that another process has begun under a name; None where there is none."""
        ...

    def publish(self, directory: AnyPlace, final: AnyPlace, manifest: Manifest, needless: Sequence[AnyPlace]) -> None:
        """Makes a checkpoint of a save's directory, atomically. ``needless``: files that it has no more use for.

        Raises CheckpointError for a step that exists, OSError.
        """
        ...

    def make_durable(self, final: AnyPlace) -> None:
        """Makes the name of a new checkpoint survive a loss of power. Raises OSError."""
        ...

    def failure(self, final: AnyPlace, error: OSError) -> CheckpointError:
        """The error of a checkpoint that could not be written."""
        ...
