"""Published steps of one model on the same chips under two layouts: whether the plan says of both which is faster, and by how much.

Both have the same model, engine, program, precision, length of rows, kind and number of chips; their layouts differ, and their rows may. The time is that
of a token. Steps of one program that differ in a release or a precision too are no pair here: the layout alone is to be judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from benchmarks.published.__main__ import Row
from benchmarks.published.steps import Published

FAR = 0.15
"""Ratios that differ by more are counted."""
OF_A_LAYOUT = ("layout", "mesh", "move", "stages", "schedule")
HEADER = "| slower | faster | published | planned | error |"


class Pair(NamedTuple):
    """Two steps, and how many times as long a token takes in the slower one."""

    slower: Row
    faster: Row
    published: float
    planned: float

    @property
    def is_right(self) -> bool:
        return self.planned > 1

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def pairs(rows: Iterable[Row]) -> Iterator[Pair]:
    """Every pair, of the rows in their order."""
    for pair in combinations(rows, 2):
        if alike(pair[0].step) == alike(pair[1].step) and layout(pair[0].step) != layout(pair[1].step):
            slower, faster = sorted(pair, key=lambda row: -row.seconds / tokens(row.step))
            share = tokens(faster.step) / tokens(slower.step)
            yield Pair(slower, faster, slower.seconds / faster.seconds * share, slower.planned / faster.planned * share)


def alike(step: Published) -> tuple[str | None, ...]:
    """What two steps of a pair have in common."""
    kind, _, rest = (option(step, "chips") or "").partition(":")
    shape, _, file = rest.partition("+")
    devices = 1
    for size in shape.replace("*", "x").split("x"):
        devices *= int(size)
    more = [word for word in step.arguments if word.startswith(("num_experts=", "top_k="))]
    return (
        step.model,
        *more,
        option(step, "engine"),
        kind,
        str(devices),
        file,
        option(step, "length"),
        option(step, "precision"),
    )


def layout(step: Published) -> tuple[str | None, ...]:
    """The words of a step's layout."""
    return tuple(option(step, name) for name in OF_A_LAYOUT)


def tokens(step: Published) -> int:
    """Tokens of a step."""
    return int(option(step, "batch") or 1) * int(option(step, "length") or 1)


def option(step: Published, name: str) -> str | None:
    """A word of a step's command."""
    words = step.arguments
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else None


def section(found: Iterable[Pair]) -> str:
    """The page's text about them."""
    of_all = sorted(found, key=lambda pair: pair.error)
    right, far = sum(pair.is_right for pair in of_all), sum(abs(pair.error) > FAR for pair in of_all)
    apart = [pair for pair in of_all if pair.published > 1.05]
    lines = [
        f"- the faster is said to be faster: {right} of {len(of_all)}",
        f"- of those more than 5% apart: {sum(pair.is_right for pair in apart)} of {len(apart)}",
        f"- off by more than {FAR:.0%}: {far}",
        "",
        HEADER,
        "|---|---|---:|---:|---:|",
        *(
            f"| {pair.slower.step.name} | {pair.faster.step.name} | {pair.published:.2f} | {pair.planned:.2f} | {pair.error:+.0%}{'' if pair.is_right else ': wrong'} |"
            for pair in of_all
        ),
    ]
    return "\n".join(lines)
