"""SW415 of policies of recomputation: what an engine does not run of them."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import option
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.core.policies.policy import BASES, read_policy


def policies(plan: Plan) -> Iterator[Draft]:
    """Some engines follow all policies where no stages are beside them, and beside stages those by name."""
    request = plan.request
    if request.remat in BASES or plan.pipeline is None or "parts of policies in stages" not in request.properties.lacks:
        return
    of_activations = any(part.names for part in read_policy(request.remat).parts)
    finding = Finding(
        code=NOT_RUN,
        severity="error",
        where="--remat",
        found=f"policy '{request.remat}' of "
        + ("single activations" if of_activations else "some layers")
        + f", which {request.properties.title} does not run beside stages yet",
        needed="full, dots or none",
    )
    yield Draft(finding=finding, candidates=tuple(option("remat", base) for base in BASES))
