"""A finding before its fix is chosen: candidates in order, of which the first that holds is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.core.finding import Finding
from shardwright.core.request import Request

Key = tuple[str, str | None, str]
"""What makes two findings the same one: code, tensor and place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a user would type, and what that makes of a request. Equal texts mean equal edits."""

    text: str
    edit: Callable[[Request], Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A finding without a fix, and what might mend it, the best first."""

    finding: Finding
    candidates: tuple[Candidate, ...] = ()

    @property
    def key(self) -> Key:
        return self.finding.code, self.finding.tensor, self.finding.where

    def settled(self, holds: Callable[[Candidate], bool]) -> Finding:
        """The finding with the first candidate that holds as its fix; as it is where none does."""
        for candidate in self.candidates:
            if holds(candidate):
                return replace(self.finding, fix=candidate.text)
        return self.finding
