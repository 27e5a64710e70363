"""A finding before its fix is chosen: candidates in order, of which the first that holds is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardwright.core.findings.finding import Finding

Subject = TypeVar("Subject")
"""What is edited: a request, or somebody's own configuration."""

Key = tuple[str, str | None, str]
"""What makes two findings the same one: code, tensor and place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[Subject]):
    """What a user would type, and what that makes of the subject. Equal texts mean equal edits."""

    text: str
    edit: Callable[[Subject], Subject]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Generic[Subject]):
    """A finding without a fix, and what might mend it, the best first."""

    finding: Finding
    candidates: tuple[Candidate[Subject], ...] = ()

    @property
    def key(self) -> Key:
        return self.finding.code, self.finding.tensor, self.finding.where

    def settled(self, holds: Callable[[Candidate[Subject]], bool]) -> Finding:
        """The finding with the first candidate that holds as its fix; as it is where none does."""
        for candidate in self.candidates:
            if holds(candidate):
                return replace(self.finding, fix=candidate.text)
        return self.finding
