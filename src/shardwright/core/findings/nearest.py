"""The known name closest to a misspelt one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

MOST_COMPARED = 10_000


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name nearest to ``name``, or None if none is near.

    A number identifies one of a kind, so a name with another number is another name, not a typing error; the same digits
    in another order are a typing error.

    Of very many names none is compared: that takes seconds.

    >>> nearest("tensorr", ["data", "fsdp", "tensor"])
    'tensor'
    >>> nearest("llama-8b", ["llama3-8b", "llama3-70b"]), nearest("h200", ["h100"])
    ('llama3-8b', None)
    >>> nearest("bfloat61", ["float32", "bfloat16"])
    'bfloat16'
    """
    numbers, names = _numbers(name), list(islice(known, MOST_COMPARED + 1))
    if len(names) > MOST_COMPARED:
        return None
    same_numbers = [other for other in names if numbers <= _numbers(other)]
    matches = get_close_matches(name, same_numbers, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _numbers(name: str) -> Counter[str]:
    """The digits of each number in a name, sorted."""
    return Counter("".join(sorted(digits)) for digits in re.findall(r"[0-9]+", name))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known name, and otherwise lists them all.

    >>> did_you_mean("fsbp", ["data", "fsdp"])
    "Did you mean 'fsdp'?"
    """
    names = list(known)
    match = nearest(name, names)
    return f"Did you mean '{match}'?" if match else f"Known: {', '.join(names)}."
