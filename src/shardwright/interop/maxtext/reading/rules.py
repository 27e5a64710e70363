"""One rule of a list: a logical name, and the mesh axes that shard a dim of that name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.findings.position import Position

NOWHERE = Position(source="<python>", line=1, column=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """All of ``axes`` shard ``name``, or none of them where one is taken. No axes: the dim stays unsharded.

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
        """The line number, as findings refer to it."""
        return f"line {self.position.line}"


Rules = Sequence[Rule]
"""In order of priority: the first rule that can apply does."""


def rule(name: str, *axes: str) -> Rule:
    """A rule that is in no file."""
    return Rule(name=name, axes=axes)


def names_of(rules: Rules) -> tuple[str, ...]:
    """Each name once, in the order of the first rule that has it."""
    return tuple(dict.fromkeys(each.name for each in rules))
