"""A spec in colours: every mesh axis has one, the same in every table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text

PALETTE = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of the axes, in mesh order; a seventh axis starts again."""

DIM = "bright_black"


@dataclass(frozen=True, slots=True)
class AxisColors:
    """The style of each mesh axis. An axis of size 1 cuts nothing: it stays in the background, and out of specs."""

    styles: Mapping[str, str]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The axes of size 1."""
        return tuple(axis for axis, style in self.styles.items() if style == DIM)

    @classmethod
    def of(cls, mesh: Mapping[str, int]) -> AxisColors:
        larger = [axis for axis, size in mesh.items() if size > 1]
        return cls(
            {axis: PALETTE[larger.index(axis) % len(PALETTE)] if axis in larger else DIM for axis in mesh},
        )

    def axis(self, name: str, text: str | None = None) -> Text:
        """A text about one axis, its name where none is given."""
        return Text(name if text is None else text, style=self.styles.get(name, ""))

    def axes(self, names: Iterable[str], between: str = "/") -> Text:
        return Text(between).join([self.axis(name) for name in names])

    def spec(self, notation: str) -> Text:
        """A text in the notation with its mesh axes coloured, without those that cut nothing."""
        words = []
        for word in notation.split():
            logical_axis, *axes = word.split("/")
            cutting = [axis for axis in axes if self.styles.get(axis) != DIM]
            words.append(Text.assemble(logical_axis, *(part for axis in cutting for part in ("/", self.axis(axis)))))
        return Text(" ").join(words)
