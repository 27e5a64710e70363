"""The sections of docs/sameness.md on random layouts, from the measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

TITLES = {"float32": "Layouts drawn at random", "bfloat16": "Layouts drawn at random, in bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One layout compared with one device. ``attention``, ``moe``: how keys and tokens are moved, empty where they are not."""

    number: int
    engine: str
    family: str
    axes: int
    attention: str
    moe: str
    another_order: bool
    seconds: float
    loss: float
    gradient: float
    weight: str
    share: float
    of: str
    wrong: str
    refused: Mapping[str, int]


def section(results: Sequence[Result], seed: int, dtype: str) -> str:
    """The section without its title."""
    return "\n".join(_lines(results, seed, dtype))


def _lines(results: Sequence[Result], seed: int, dtype: str) -> Iterator[str]:
    numbers = f"{len(results):,} layouts of seed {seed}"
    yield f"{numbers} (`python -m tests.sameness.random_whole --seed {seed} --dtype {dtype}`), each for two steps,"
    yield "compared with one device of the same engine: random roles of every component, up to four axes in any order, on up to 16"
    yield "simulated devices of JAX or 8 ranks of PyTorch; every movement, rules, `weights:`, microbatches, head-tail, remat."
    yield ""
    bounded = " largest share of its bound | of | number |" if dtype == "bfloat16" else ""
    yield f"| engine | family | layouts | loss | gradient | of | number |{bounded}"
    yield "|---|---|---:|---:|---:|---|---:|" + ("---:|---|---:|" if bounded else "")
    for key in sorted({(one.engine, one.family) for one in results}):
        rows = [one for one in results if (one.engine, one.family) == key]
        worst = max(rows, key=lambda one: one.gradient)
        loss = max(one.loss for one in rows)
        line = f"| {key[0]} | {key[1]} | {len(rows)} | {loss:.1e} | {worst.gradient:.1e} | {worst.weight} | {worst.number} |"
        most = max(rows, key=lambda one: one.share)
        yield line + (f" {most.share:.2f} | {most.of} | {most.number} |" if bounded else "")
    yield ""
    yield f"- Axes larger than 1: {_counts(str(one.axes) for one in results)}."
    yield f"- Keys: {_counts(one.attention or 'not moved' for one in results)}."
    yield f"- Tokens and experts: {_counts(one.moe or 'not moved' for one in results)}."
    yield f"- Layouts with a dim whose axes are not in mesh order: {sum(one.another_order for one in results)}."
    refused = Counter[str]()
    for one in results:
        refused.update(one.refused)
    codes = ", ".join(f"{number} by {what}" for what, number in refused.most_common())
    yield f"- Refused by the planner, and drawn again: {refused.total()} ({codes})."
    yield ""


def _counts(words: Iterator[str]) -> str:
    return ", ".join(f"{word} {number}" for word, number in sorted(Counter(words).items()))
