"""From rich's drawing to the text for one stream: its width, and colours only on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType

MIN_WIDTH = 60

View = Callable[[int], RenderableType]
"""Draws for a width, in columns."""


def to_text(view: View, stream: TextIO, width: int | None = None) -> str:
    """The text to write to ``stream``. Piped, or under NO_COLOR, it has no colours; COLUMNS sets a width."""
    console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False, soft_wrap=False)
    width = max(MIN_WIDTH, console.width)
    with console.capture() as capture:
        console.print(view(width), width=width)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))
