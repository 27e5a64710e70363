"""A spec in colours: every mesh axis has one colour, the same in every table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text

PALETTE = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of the axes, in mesh order; a seventh axis has the first colour again."""

DIM = "bright_black"


@dataclass(frozen=True, slots=True)
class AxisColors:
    """The style of each mesh axis. An axis of size 1 shards nothing: it is dim, and left out of specs."""

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
        """A text in the colour of one axis; by default the axis's name."""
        return Text(name if text is None else text, style=self.styles.get(name, ""))

    def axes(self, names: Iterable[str], between: str = "/") -> Text:
        return Text(between).join([self.axis(name) for name in names])

    def spec(self, notation: str) -> Text:
        """A spec in the notation with its mesh axes coloured, without those of size 1."""
        words = []
        for word in notation.split():
            logical_axis, *axes = word.split("/")
            sharding = [axis for axis in axes if self.styles.get(axis) != DIM]
            words.append(Text.assemble(logical_axis, *(text for axis in sharding for text in ("/", self.axis(axis)))))
        return Text(" ").join(words)
