"""Times of steps that alternate in one process, so that other load on the machine slows all of them equally."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds per step of each block of steps: CPU time of all cores, and wall time."""

    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]

    @property
    def cpu(self) -> float:
        """The median block."""
        return median(self.cpu_s)

    @property
    def wall(self) -> float:
        """The median block."""
        return median(self.wall_s)

    def to_json(self) -> dict[str, list[float]]:
        """Every block."""
        return {"cpu_s": list(self.cpu_s), "wall_s": list(self.wall_s)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median over blocks, and the quartiles around it."""

    low: float
    middle: float
    high: float

    def to_json(self) -> dict[str, float]:
        """The three numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def cpu_seconds() -> float:
    """CPU time of this process, of all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_turns(steps: Mapping[str, Callable[[], object]], *, blocks: int, block_s: float) -> dict[str, Times]:
    """Each runs for about ``block_s`` per block, in an order that is reversed from block to block."""
    lengths: dict[str, int] = {}
    for name, go in steps.items():
        go()
        started = time.perf_counter()
        go()
        lengths[name] = max(1, round(block_s / (time.perf_counter() - started)))
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for block in range(blocks):
        for name in names if block % 2 == 0 else reversed(names):
            before, started = cpu_seconds(), time.perf_counter()
            for _ in range(lengths[name]):
                steps[name]()
            cpu[name].append((cpu_seconds() - before) / lengths[name])
            wall[name].append((time.perf_counter() - started) / lengths[name])
    return {name: Times(cpu_s=tuple(cpu[name]), wall_s=tuple(wall[name])) for name in steps}


def ratio(above: tuple[float, ...], below: tuple[float, ...]) -> Ratio:
    """The ratio of times measured in the same blocks."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return Ratio(low=low, middle=middle, high=high)
