"""A setting that changes only what is learned, and that neither engine computes: one finding, whatever program states it."""

from __future__ import annotations

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position


def training_only(key: str, value: str, part: str, position: Position | None = None) -> Finding:
    """``key`` has a ``value`` for which training here lacks a ``part``, as the auxiliary loss of experts."""
    return Finding(
        code="SW123",
        severity="warning",
        where=f"'{key}'",
        position=position,
        found=f"{value}: training here lacks {part}",
        needed="nothing for outputs; a run here learns without it",
    )
