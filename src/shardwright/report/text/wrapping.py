"""Lines that are broken between words only, so that each value is whole: a word that is too long makes its line too long."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

BREAK = re.compile(r"(?<! ) +(?! )(?!(?<=\d )(?:[KMGTP]iB|B|s|ms|us)\b)")
"""Spaces at which a line may be broken: not those between a number and its unit."""


def wrapped(text: Text, width: int) -> list[Text]:
    """The lines of a text, each broken between words where it has more than ``width`` columns. What goes on below keeps its indent.

    >>> [line.plain for line in wrapped(Text("takes 28.4 s in all"), 11)]
    ['takes', '28.4 s in', 'all']
    """
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        for number, piece in enumerate(line.divide(_breaks(line.plain, indent, width))):
            piece.rstrip()
            lines.append(piece if number == 0 else Text(" " * indent).append_text(piece))
    return lines


def longest_word(text: Text) -> int:
    """The columns of the longest part that is never broken."""
    return max(len(word) for line in text.plain.split("\n") for word in BREAK.split(line))


def hanging(label: Text, text: Text, width: int) -> list[Text]:
    """A label and the lines of a text beside it."""
    beside = wrapped(text, width - len(label))
    return [(label if number == 0 else Text(" " * len(label))) + line for number, line in enumerate(beside)]


def lines_of(drawing: RenderableType, width: int) -> Iterator[Text]:
    """The lines of a view's texts and groups of texts. A text that says ``no_wrap`` is laid out already."""
    if isinstance(drawing, Group):
        for part in drawing.renderables:
            yield from lines_of(part, width)
    else:
        assert isinstance(drawing, Text), type(drawing)
        yield from drawing.split("\n", allow_blank=True) if drawing.no_wrap else wrapped(drawing, width)


def _breaks(line: str, indent: int, width: int) -> list[int]:
    """Where the words begin that go to the next line."""
    starts: list[int] = []
    begin, possible = 0, 0
    for match in [*BREAK.finditer(line, indent), None]:
        end = len(line) if match is None else match.start()
        if end - begin + (indent if starts else 0) > width and possible > begin:
            starts.append(possible)
            begin = possible
        possible = len(line) if match is None else match.end()
    return starts
