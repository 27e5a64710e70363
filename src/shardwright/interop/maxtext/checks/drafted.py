"""A finding on imported rules before its fix is chosen: remedies in order, of which the first that holds is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shardwright.core.finding import Finding
from shardwright.interop.maxtext.placing import Imported
from shardwright.interop.maxtext.rules import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What a person would write, and what that makes of a configuration."""

    text: str
    edit: Callable[[Imported], Imported]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A finding without a fix, and what might mend it, the best first."""

    finding: Finding
    remedies: tuple[Remedy, ...] = ()

    @property
    def key(self) -> tuple[str, str | None, str]:
        return self.finding.code, self.finding.tensor, self.finding.where

    def settled(self, holds: Callable[[Remedy], bool]) -> Finding:
        """The finding with the first remedy that holds; as it is where none does."""
        text = next((remedy.text for remedy in self.remedies if holds(remedy)), None)
        return self.finding if text is None else replace(self.finding, fix=text)


def without(rules: Iterable[Rule], *names: str) -> list[Rule]:
    """The list without the lines of some names."""
    return [line for line in rules if line.name not in names]


def in_place(rules: Iterable[Rule], name: str, *lines: Rule) -> list[Rule]:
    """The list with other lines where the first line of a name stood; at the end where it had none."""
    before = list(rules)
    index = next((number for number, line in enumerate(before) if line.name == name), len(before))
    return [*without(before[:index], name), *lines, *without(before[index:], name)]
