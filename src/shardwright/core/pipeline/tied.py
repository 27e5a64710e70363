"""Weights that two stages have: a tied embedding, whose uses are at the two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.core.plan.plan import Plan


def tied_stages(plans: Sequence[Plan]) -> Mapping[str, tuple[int, int]]:
    """Each weight that two of the stages have, with their numbers. The gradients of both are its gradient. ``plans``: of each stage."""
    found: dict[str, list[int]] = {}
    for number, own in enumerate(plans):
        for row in own.weights:
            if row.stack is None:
                found.setdefault(row.name, []).append(number)
    return {name: (numbers[0], numbers[-1]) for name, numbers in found.items() if len(numbers) > 1}
