"""The view of the answers of plans with chips, side by side: a line for each figure, the difference last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph, section
from shardwright.report.text.units import pretty_bytes, pretty_seconds, rounded

Answered = Mapping[str, Any]
"""An answer in the form of ``Answer.to_json``, which a lock may hold."""

LINES: Sequence[tuple[str, tuple[str, ...], Callable[[Any], str]]] = (
    ("memory of a device", ("needed_bytes",), pretty_bytes),
    ("fits", ("fits",), lambda fits: "yes" if fits else "no"),
    ("a step", ("step_s",), pretty_seconds),
    ("tokens/s a device", ("tokens_per_s_per_device",), lambda tokens: f"{tokens:,.0f}"),
    ("MFU", ("mfu",), lambda share: f"{share:.1%}"),
    ("waiting for communication", ("exposed_share",), lambda share: f"{share:.1%}"),
    ("days", ("training", "days"), lambda days: rounded(days, 3)),
    ("device-hours", ("training", "device_hours"), rounded),
    ("cost", ("training", "cost"), rounded),
)
"""Each line's name, its place in an answer, and how its values are shown."""

NOT_SAID = "-"

AS_FAST = 0.01
"""Plans whose tokens/s differ by less are called equal: no estimate is that exact."""


def answers_section(
    answers: Sequence[Answered | None], names: Sequence[str], width: int, *, alike: bool = True
) -> RenderableType:
    """The figures of each plan in a column, and, of two plans whose tokens are ``alike``, which is faster and by how much."""
    columns = [Column(header=""), *(Column(header=name, right=True) for name in names)]
    cells = [[Text(cell) for cell in row] for row in answer_rows(answers)]
    verdict = [paragraph(faster(answers, names))] if len(answers) == 2 and alike else []
    return section(
        "on its chips",
        aligned(columns, [RowGroup(cells=cells)], width),
        *(text for text in verdict if text.plain.strip()),
    )


def answer_rows(answers: Sequence[Answered | None]) -> list[list[str]]:
    """A line for each figure that an answer has: its name, and its value in each."""
    lines = ((title, [_at(answer, place) for answer in answers], shown) for title, place, shown in LINES)
    return [
        [title, *(NOT_SAID if value is None else shown(value) for value in values)]
        for title, values, shown in lines
        if any(value is not None for value in values)
    ]


def faster(answers: Sequence[Answered | None], names: Sequence[str]) -> str:
    """Which of two plans trains more tokens in a second, and by how much; nothing where one has no time.

    >>> faster([{"tokens_per_s": 100.0}, {"tokens_per_s": 125.0}], ["A", "B"])
    'B trains 1.25 times as many tokens a second as A.'
    """
    rates = [_at(answer, ("tokens_per_s",)) for answer in answers]
    if not all(rates):
        return ""
    (slow, low), (fast, high) = sorted(zip(names, rates, strict=True), key=lambda pair: pair[1])
    if high / low < 1 + AS_FAST:
        return f"{names[0]} and {names[1]} are equally fast."
    return f"{fast} trains {high / low:.3g} times as many tokens a second as {slow}."


def _at(answer: Answered | None, place: Sequence[str]) -> Any:
    value: Any = answer
    for name in place:
        value = None if value is None else value.get(name)
    return value
