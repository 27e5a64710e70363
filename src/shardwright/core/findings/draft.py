"""A finding before its fix is selected: candidates in order; the first that passes the check is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardwright.core.findings.finding import Finding

Subject = TypeVar("Subject")
"""The type of what is edited: a request, or a user's own configuration."""

Key = tuple[str, str | None, str]
"""The identity of a finding: code, tensor and place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[Subject]):
    """The text of a fix, and the edit that it makes to the subject. Equal texts mean equal edits."""

    text: str
    edit: Callable[[Subject], Subject]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Generic[Subject]):
    """A finding without a fix, and its candidate fixes, the best first."""

    finding: Finding
    candidates: tuple[Candidate[Subject], ...] = ()

    @property
    def key(self) -> Key:
        return self.finding.code, self.finding.tensor, self.finding.where

    def settled(self, holds: Callable[[Candidate[Subject]], bool]) -> Finding:
        """The finding with the first candidate for which ``holds`` is true as its fix; unchanged if there is none."""
        for candidate in self.candidates:
            if holds(candidate):
                return replace(self.finding, fix=candidate.text)
        return self.finding
