"""The capacity of an expert, and the most assignments that a device can receive: the same numbers for plan and engines.

The first is a property of the model and the same on every layout. The second is the capacity of a buffer that never
overflows. Buffers begin smaller, with room for more than a trained router sends, and grow where a device receives more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

SHARES_AT_FIRST = 1.25
"""The capacity of a buffer that nobody sized, in even shares of assignments. A choice, not a measurement: a router that is balanced while it is
trained stays below, and one that is not costs a few compilations of JAX until its buffers have grown."""

ROWS_AT_FIRST = 4096
"""The least that such a buffer has: the fewer rows, the more their number varies by chance."""

TILE_ROWS = 512
"""It has a multiple of these, so that tiles of kernels divide it (``core/plan/expert_kernels.py``)."""

ROOM_FOR_ALL = 1e308
"""Even shares that no device receives: a buffer for the worst case."""


def row_capacity(factor: float | None, *, top_k: int, experts: int, length: int) -> int | None:
    """The most tokens of one row that one expert of a layer takes: its even share times the factor, rounded up.

    At most the tokens of the row. None without a factor: then no token is dropped.

    >>> row_capacity(1.25, top_k=2, experts=8, length=64), row_capacity(None, top_k=2, experts=8, length=64)
    (20, None)
    >>> row_capacity(1e308, top_k=2, experts=8, length=64)
    64
    """
    return None if factor is None else ceil(min(length, factor * top_k * length / experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The token-expert assignments that one device sends in one microbatch, and the most that it can receive.

    The experts are sharded over ``devices``, with ``experts`` on each; a single device has all of them, or gathers
    their weights. Each device has ``tokens`` tokens of each of its ``rows`` rows; a row is sharded over ``row_shards``
    of these devices. A token has ``top_k`` assignments; an expert takes ``capacity`` tokens of a row, or all if None.

    >>> even = Traffic(devices=4, experts=2, rows=2, tokens=64, row_shards=1, top_k=2, capacity=None)
    >>> even.assignments, even.most, even.buffer_rows(None), even.buffer_rows(1.5), even.buffer_rows(ROOM_FOR_ALL)
    (256, 1024, 1024, 384, 1024)
    >>> Traffic(devices=8, experts=1, rows=4, tokens=4096, row_shards=1, top_k=2, capacity=None).buffer_rows(None)
    40960
    >>> Traffic(devices=4, experts=2, rows=2, tokens=64, row_shards=1, top_k=2, capacity=20).most
    320
    """

    devices: int
    experts: int
    rows: int
    tokens: int
    row_shards: int
    top_k: int
    capacity: int | None

    @property
    def assignments(self) -> int:
        """Assignments of one device's tokens; it receives the same number if the load of the experts is even."""
        return self.rows * self.tokens * self.top_k

    @property
    def most(self) -> int:
        """The most assignments that one device can receive: all tokens of the group are routed to its experts."""
        if self.capacity is None:
            return self.devices * self.to_one
        rows = self.devices * self.rows // self.row_shards
        taken = self.experts * self.capacity * rows
        return min(self.devices * self.to_one, taken)

    @property
    def to_one(self) -> int:
        """The most assignments that one device sends to one other."""
        most = self.rows * self.tokens * min(self.top_k, self.experts)
        if self.capacity is None:
            return most
        return min(most, self.experts * self.capacity * self.rows)

    def buffer_rows(self, factor: float | None) -> int:
        """The capacity of a device's buffer: its even share of assignments times the factor, at most ``most``.

        Without a factor: what it has before it grows.
        """
        if factor is None:
            wanted = max(ROWS_AT_FIRST, SHARES_AT_FIRST * self.assignments)
            return min(self.most, ceil(wanted / TILE_ROWS) * TILE_ROWS)
        return ceil(min(self.most, factor * self.assignments))

    def log_chance_of_more(self, rows: int) -> float:
        """The natural logarithm of an upper bound of the chance that any device of a group receives more than ``rows`` assignments in one layer and
        microbatch, where a token has each set of experts with the same probability.

        What a device receives is then a sum of independent hypergeometric numbers, which is at most as spread as a binomial one (Hoeffding 1963,
        theorem 4): the bound is Chernoff's of that, times the devices.

        >>> traffic = Traffic(devices=4, experts=2, rows=2, tokens=64, row_shards=1, top_k=2, capacity=None)
        >>> [round(traffic.log_chance_of_more(rows), 1) for rows in (256, 320, 384, 1023)]
        [0.0, -9.1, -38.2, -1418.2]
        """
        trials = self.devices * self.assignments
        share, even = min(1.0, (rows + 1) / trials), 1.0 / self.devices
        if share <= even:
            return 0.0
        apart = share * log(share / even) + ((1 - share) * log((1 - share) / (1 - even)) if share < 1 else 0.0)
        return min(0.0, log(self.devices) - trials * apart)
