"""Whose a collective is that is being carried out: the component, and the tensor of the plan that moves.

Nothing reads it in training. A walk through a step without devices (``dry_run.py``) does, to hold what it sees against
the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_HERE: ContextVar[tuple[str, str] | None] = ContextVar("moving", default=None)


@contextmanager
def moving(component: str, tensor: str) -> Iterator[None]:
    """Around what moves a tensor of a component."""
    before = _HERE.set((component, tensor))
    try:
        yield
    finally:
        _HERE.reset(before)


def what_moves() -> tuple[str, str] | None:
    """The component and the tensor, or None where nobody said."""
    return _HERE.get()
