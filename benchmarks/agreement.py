"""Checks that both steps compute the same, without which their times cannot be compared."""

from __future__ import annotations

from benchmarks.cases import Case, Running

STEPS = 3


def disagreement(ours: Running, handwritten: Running) -> float:
    """The largest relative difference of losses and gradient norms over a few steps from the same values."""
    worst = 0.0
    for _ in range(STEPS):
        for our, their in zip(ours.go(), handwritten.go(), strict=True):
            worst = max(worst, abs(our / their - 1))
    return worst


def require_agreement(case: Case, worst: float, tolerance: float = 1e-5) -> None:
    """Ends the command if the steps do not compute the same."""
    if not worst <= tolerance:
        raise SystemExit(f"{case}: losses or norms of the two steps differ by {worst:.1e}, more than {tolerance:g}")
