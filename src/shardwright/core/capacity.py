"""How many tokens an expert takes, and how many slots they have: the model's numbers, the same on every layout.

The planner sizes the dispatched tensor by these, and the engines make it.
"""

from __future__ import annotations

from math import ceil


def row_capacity(factor: float | None, *, top_k: int, experts: int, length: int) -> int | None:
    """Tokens of one row that one expert takes at most: its even share times the factor, rounded up.

    None where there is no factor: then no token is dropped.

    >>> row_capacity(1.25, top_k=2, experts=8, length=64), row_capacity(None, top_k=2, experts=8, length=64)
    (20, None)
    """
    return None if factor is None else ceil(factor * top_k * length / experts)


def num_slots(tokens: int, capacity: int | None) -> int:
    """Slots per expert and group of ``tokens``: all of them where none may be dropped, else at most a row's capacity.

    >>> num_slots(16, 20), num_slots(64, 20), num_slots(64, None)
    (16, 20, 64)
    """
    return tokens if capacity is None else min(tokens, capacity)
