"""The bytes that a program holds in a dry run: those of every storage, from its first tensor to its last."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.engine_torch.io.private import global_shapes, storage_key


class Held:
    """``now`` and ``peak``: bytes of all live storages, by their own sizes, without what an allocator adds."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._for_shapes = False

    def add(self, made: Any) -> None:
        """Record the tensors in the result of an operation."""
        if self._for_shapes:
            return
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what a rank would hold: resized storages too, since ``fully_shard`` frees gathered weights by resizing their storage to 0,
        which is not an operation on tensors; and nothing that DTensor makes to find a shape."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = plain(storage, size)
            self._note(storage)
            return done

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with global_shapes(self.for_shapes):
                yield
        finally:
            torch.UntypedStorage.resize_ = plain

    @contextmanager
    def for_shapes(self) -> Iterator[None]:
        """Nothing that is made inside is recorded: no rank holds it."""
        before, self._for_shapes = self._for_shapes, True
        try:
            yield
        finally:
            self._for_shapes = before

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            reference, before = known
        else:
            reference, before = weakref.ref(storage, lambda _: self._gone(key)), 0
        if size != before or known is None:
            self._sizes[key] = reference, size
            self.now += size - before
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)[1]
