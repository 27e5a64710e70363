"""The time of initial values by the number of threads that compute them.

python -m benchmarks.initial_values [--quick]
"""

from __future__ import annotations

import time
from statistics import median
from unittest import mock

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.core.boxes.box import Box
from shardwright.core.model.table import Initializer
from shardwright.init import tensor_values, values

SHAPE = (4096, 8192)
THREADS = (1, 2, 4, 8)


def seconds(threads: int) -> float:
    """Of a matrix, computed by at most so many threads."""
    with mock.patch.object(values, "MOST_THREADS", threads):
        started = time.perf_counter()
        tensor_values("w", SHAPE, Initializer(kind="normal", stddev=0.02), 0, Box.whole(SHAPE))
        return time.perf_counter() - started


def main() -> None:
    """Time all numbers of threads, in turns."""
    options = begin(__doc__, devices=1)
    turns = [{threads: seconds(threads) for threads in THREADS} for _ in range(2 if options.quick else 5)]
    found = {threads: median(turn[threads] for turn in turns) for threads in THREADS}
    rows, columns = SHAPE
    fastest = min(found.values())
    keep(
        Found(
            name="initial_values",
            title=f"Initial values of a matrix of {rows:,} x {columns:,}",
            columns=["threads", "ns an element", "times as fast"],
            rows=[
                [str(threads), f"{1e9 * taken / rows / columns:.1f}", f"{found[1] / taken:.2f}"]
                for threads, taken in found.items()
            ],
            headline=f"{found[1] / fastest:.1f} times as fast as one thread",
            notes=("A process uses as many threads as cores, and 8 at most.",),
            numbers=[{"threads": threads, "seconds": taken} for threads, taken in found.items()],
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
