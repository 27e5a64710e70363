"""Which collectives carry what a ring sends in a round, where all parcels of a collective have one length, as XLA's have.

| collective | what it sends of a process | what of it is padding |
|---|---|---|
| permutes, one for each hop | a parcel to one process | what a parcel is shorter than the longest one, and a hop without a parcel |
| all-to-all | a parcel to every process of the ring | the same, and all to which nothing is sent in this round |

Permutes send no more than the round has. An all-to-all is one collective instead of many: where parcels are short, it takes less time.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.checkpoint.exchange.rings import Relay, Steps

MOST_BYTES = 16 << 20
"""So many bytes a process has at most for one all-to-all."""

SMALLEST = 1 << 12
"""The shortest length: each is a program to compile."""

BYTES_OF_A_COLLECTIVE = 1 << 20
"""As long as a collective that sends almost nothing takes: some 0.1 ms at 10 GB/s."""


@dataclass(frozen=True, slots=True)
class Permutes:
    """One permute for each hop. ``length``: the bytes of each."""

    num_hops: int
    length: int

    @property
    def num_collectives(self) -> int:
        return self.num_hops

    @property
    def bytes_sent(self) -> int:
        """By one process, with padding."""
        return self.num_hops * self.length


@dataclass(frozen=True, slots=True)
class AllToAlls:
    """All-to-alls of ``count`` processes, one after the other, each of ``length`` bytes to each process."""

    count: int
    length: int
    num_collectives: int

    @property
    def bytes_sent(self) -> int:
        """By one process, with padding."""
        return (self.count - 1) * self.length * self.num_collectives


def carried_by(steps: Steps | Relay, count: int) -> Permutes | AllToAlls:
    """What carries some steps of a ring of ``count`` processes, the same for all of them: what takes less time.

    >>> carried_by(Steps(turn=0, first=0, last=8, num_bytes=2 << 20), 4096)
    Permutes(num_hops=8, length=2097152)
    >>> carried_by(Steps(turn=0, first=0, last=2048, num_bytes=8 << 10), 4096)
    AllToAlls(count=4096, length=4096, num_collectives=2)
    """
    permutes = Permutes(steps.num_hops, padded(steps.num_bytes))
    length = min(padded(steps.num_bytes), max(SMALLEST, MOST_BYTES // count // SMALLEST * SMALLEST))
    all_to_alls = AllToAlls(count, length, -(-steps.num_bytes // length))
    return min(permutes, all_to_alls, key=lambda one: one.bytes_sent + one.num_collectives * BYTES_OF_A_COLLECTIVE)


def padded(num_bytes: int) -> int:
    """A length that is at least as long, by a quarter at most where it is not very short: four for each power of two.

    >>> [padded(num_bytes) for num_bytes in (1, 4097, 20_000, 1 << 20, (1 << 20) + 1)]
    [4096, 8192, 20480, 1048576, 1310720]
    """
    step = max(SMALLEST, (1 << num_bytes.bit_length()) >> 3)
    return -(-num_bytes // step) * step
