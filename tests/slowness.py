"""How much slower this machine is at the moment than the one that limits of CPU time were set on.

A core that is shared with other machines' work takes up to twice the CPU time for the same work.
"""

from __future__ import annotations

from time import process_time

REFERENCE_S = 0.025
"""CPU time of the work below on two idle cores of an AMD EPYC with Python 3.11."""


def slowness(rounds: int = 5) -> float:
    """The CPU time of a fixed work of Python over that of the reference, the best of some rounds; at least 1."""
    times = []
    for _ in range(rounds):
        start = process_time()
        work()
        times.append(process_time() - start)
    return max(1.0, min(times) / REFERENCE_S)


def work() -> int:
    """Makes small objects and texts, as a plan does."""
    total = 0
    for number in range(60_000):
        row = {"first": number, "both": (number, number + 1)}
        total += len(str(row["both"])) + hash(row["both"]) % 7
    return total
