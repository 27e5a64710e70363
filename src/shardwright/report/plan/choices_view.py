"""The tables of what was chosen by cost: every option with its price, the one that was chosen marked."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.layout.auto import HOPS, LAYOUT, AutoChoice
from shardwright.report.text.columns import Column, RowGroup, aligned
from shardwright.report.text.units import pretty_bytes, pretty_seconds

CHOSEN = "chosen"


def choices_table(choices: Sequence[AutoChoice], width: int) -> RenderableType:
    """A group of lines for each choice, the cheapest option first: by time, or without times by bytes."""
    choices = [choice for choice in choices if choice.what != LAYOUT]
    timed = any(choice.seconds for choice in choices)
    columns = [Column(header="option", flexible=True)]
    columns += [Column(header="time", right=True)] if timed else []
    columns += [Column(header="sent by a device", right=True), Column(header="")]
    groups = [
        RowGroup(heading=_heading(choice), cells=[_line(choice, option, timed) for option in _cheapest_first(choice)])
        for choice in choices
    ]
    return aligned(columns, groups, width)


def _heading(choice: AutoChoice) -> Text:
    of = "all collectives over the entire slice in one step" if choice.what == HOPS else "one layer, all passes"
    return Text.assemble((choice.what, "bold"), (f"  {of}", "dim"))


def _cheapest_first(choice: AutoChoice) -> list[str]:
    return sorted(choice.wire_bytes, key=lambda option: (choice.seconds.get(option, 0.0), choice.wire_bytes[option]))


def _line(choice: AutoChoice, option: str, timed: bool) -> list[Text]:
    style = "bold" if option == choice.chosen else ""
    seconds = choice.seconds.get(option)
    cells = [Text(option, style)]
    cells += [Text("-" if seconds is None else pretty_seconds(seconds), style)] if timed else []
    mark = CHOSEN if option == choice.chosen else ""
    return [*cells, Text(pretty_bytes(choice.wire_bytes[option]), style), Text(mark, style)]
