"""The component, and the tensor of the plan, that the current collective belongs to.

Nothing reads it in training. A dry run (``dry_run.py``) does, to compare the collectives of a step with those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardwright.engine_torch.io.private import is_traced

_HERE: ContextVar[tuple[str, str] | None] = ContextVar("moving", default=None)


@contextmanager
def moving(component: str, tensor: str) -> Iterator[None]:
    """A context for the collectives that move a tensor of a component; none in a program that is compiled."""
    if is_traced():
        yield
        return
    before = _HERE.set((component, tensor))
    try:
        yield
    finally:
        _HERE.reset(before)


def what_moves() -> tuple[str, str] | None:
    """The component and the tensor of the innermost ``moving``, or None outside of one."""
    return _HERE.get()
