"""From a view to the text for one stream: its width, and colours only on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from shardwright.report.text.wrapping import lines_of

MIN_WIDTH = 60

View = Callable[[int], RenderableType]
"""Draws for a width, in columns."""


def to_text(view: View, stream: TextIO, width: int | None = None) -> str:
    """The text to write to ``stream``. Piped, or under NO_COLOR, it has no colours; COLUMNS sets a width. Nothing is truncated."""
    console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
    # rich prints nothing at a width of 0.
    width = console.width = max(MIN_WIDTH, console.width)
    with console.capture() as capture:
        console.print(Text("\n").join(lines_of(view(width), width)), soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))
