"""How many tokens an expert takes, and how many may come to a device: the same numbers for the plan and the engines.

The first is the model's and the same on every layout. The second is what a buffer must hold that has a place for
whatever may come.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


def row_capacity(factor: float | None, *, top_k: int, experts: int, length: int) -> int | None:
    """Tokens of one row that one expert of a layer takes at most: its even share times the factor, rounded up.

    Never more than the row has. None where there is no factor: then no token is dropped.

    >>> row_capacity(1.25, top_k=2, experts=8, length=64), row_capacity(None, top_k=2, experts=8, length=64)
    (20, None)
    >>> row_capacity(1e308, top_k=2, experts=8, length=64)
    64
    """
    return None if factor is None else ceil(min(length, factor * top_k * length / experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one device sends to experts in one microbatch, and what may come to it.

    ``devices`` share the experts between them, ``experts`` each; one alone has all of them, or gathers their weights.
    Each has ``tokens`` tokens of each of its ``rows`` rows, and a row lies on ``sharing`` of these devices. A token has
    ``top_k`` choices, an expert takes ``capacity`` tokens of a row, or all.

    >>> even = Traffic(devices=4, experts=2, rows=2, tokens=64, sharing=1, top_k=2, capacity=None)
    >>> even.assignments, even.most, even.buffer_rows(None), even.buffer_rows(1.5), even.buffer_rows(1e308)
    (256, 1024, 1024, 384, 1024)
    >>> Traffic(devices=4, experts=2, rows=2, tokens=64, sharing=1, top_k=2, capacity=20).most
    320
    """

    devices: int
    experts: int
    rows: int
    tokens: int
    sharing: int
    top_k: int
    capacity: int | None

    @property
    def assignments(self) -> int:
        """Choices of one device's tokens; as many come to it where all experts are chosen alike."""
        return self.rows * self.tokens * self.top_k

    @property
    def most(self) -> int:
        """Choices that come to one device where all the tokens of the group choose its experts."""
        if self.capacity is None:
            return self.devices * self.to_one
        rows = self.devices * self.rows // self.sharing
        taken = self.experts * self.capacity * rows
        return min(self.devices * self.to_one, taken)

    @property
    def to_one(self) -> int:
        """Choices that one device sends to one other at most."""
        most = self.rows * self.tokens * min(self.top_k, self.experts)
        if self.capacity is None:
            return most
        return min(most, self.experts * self.capacity * self.rows)

    def buffer_rows(self, factor: float | None) -> int:
        """Rows of a device's buffer: the choices of its even share times the factor, and never more than may come.

        Without a factor: as many as may come.
        """
        return self.most if factor is None else ceil(min(self.most, factor * self.assignments))
