"""A finding on imported rules before its fix is chosen, and edits of a list of rules."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.interop.maxtext.reading.rules import Rule
from shardwright.interop.maxtext.resolution.placement import Imported

Remedy = Candidate[Imported]
Drafted = Draft[Imported]


def without(rules: Iterable[Rule], *names: str) -> list[Rule]:
    """The list without the rules of some names."""
    return [line for line in rules if line.name not in names]


def in_place(rules: Iterable[Rule], name: str, *lines: Rule) -> list[Rule]:
    """The list with the rules of a name replaced, at the place of its first rule; at the end where it had none."""
    before = list(rules)
    index = next((number for number, line in enumerate(before) if line.name == name), len(before))
    return [*without(before[:index], name), *lines, *without(before[index:], name)]
