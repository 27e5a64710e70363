"""One line of a list of rules: a logical name, and the mesh axes that would cut a dim of that name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.findings.position import Position

NOWHERE = Position(source="<python>", line=1, column=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``name`` is cut by all of ``axes`` or, where one of them is taken, by none; no axes: it stays whole.

    >>> print(rule("embed", "fsdp", "expert"))
    [embed, [fsdp, expert]]
    """

    name: str
    axes: tuple[str, ...]
    position: Position = NOWHERE

    def __str__(self) -> str:
        return f"[{self.name}, [{', '.join(self.axes)}]]"

    @property
    def line(self) -> str:
        """How a finding points at it."""
        return f"line {self.position.line}"


Rules = Sequence[Rule]
"""In order of priority: the first line that can be obeyed is."""


def rule(name: str, *axes: str) -> Rule:
    """A rule that stands in no file."""
    return Rule(name=name, axes=axes)


def names_of(rules: Rules) -> tuple[str, ...]:
    """Each name once, in the order of the first line that has it."""
    return tuple(dict.fromkeys(each.name for each in rules))
