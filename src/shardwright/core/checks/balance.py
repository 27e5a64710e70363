"""SW122: load balancing that is requested where there is nothing to balance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def balance(plan: Plan) -> Iterator[Draft]:
    """One draft where load balancing is requested and rows keep the order of the text."""
    if not plan.request.load_balanced or not plan.rows_in_order:
        return
    shared = plan.mesh.larger_than_one(plan.cp)
    found = (
        "under 'ulysses' each device attends to entire rows with some of the heads: equal work already"
        if shared
        else "no axis larger than 1 shards the tokens of a row: each device has entire rows"
    )
    finding = Finding(
        code="SW122",
        severity="info",
        where="--load-balance",
        found=f"{found}; rows keep the order of the text",
        needed="an axis with role 'context' in 'input', and keys that are gathered or sent around a ring",
    )
    without = Candidate(text="Remove --load-balance.", edit=lambda request: replace(request, load_balanced=False))
    yield Draft(finding=finding, candidates=(without,))
