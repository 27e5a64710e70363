"""Checks of a whole plan. Each file holds one group; each check is a generator of drafts."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.finding import Finding
from shardwright.core.plan import Plan
from shardwright.core.request import Request


def check(plan: Plan, resolve: Callable[[Request], Plan]) -> tuple[Finding, ...]:
    """Every finding about a plan."""
    return ()
