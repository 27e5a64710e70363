"""The known name that a misspelt one most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to ``name``, or None when nothing is near.

    >>> nearest("tensorr", ["data", "fsdp", "tensor"])
    'tensor'
    """
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known name, and otherwise lists them all.

    >>> did_you_mean("fsbp", ["data", "fsdp"])
    "Did you mean 'fsdp'?"
    """
    names = list(known)
    match = nearest(name, names)
    return f"Did you mean '{match}'?" if match else f"Known: {', '.join(names)}."
