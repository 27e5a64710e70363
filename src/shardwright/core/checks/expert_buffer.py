"""SW405: tokens that are dropped at a full expert, and the capacity of the buffer for received assignments."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding, Severity
from shardwright.core.layout.wording import bytes_text
from shardwright.core.mesh.notation import place_in
from shardwright.core.model.capacity import Traffic
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.resolve import capacity_of, traffic_of

MOST_ZEROS = 18
"""Of a chance that is printed: what is rarer happens in no training."""


def expert_buffer(plan: Plan) -> Iterator[Draft]:
    """Drafts for a model with experts: which tokens it drops, and a device's buffer capacity for assignments."""
    request, tensors = plan.request, plan.by_name
    if request.table.top_k is None or request.table.names.received not in tensors:
        return
    traffic = traffic_of(request, plan.mesh)
    buffer_rows, even_share = traffic.buffer_rows(request.expert_buffer), f"{traffic.assignments:,}"
    capacity = capacity_of(request.table, request.length)
    if capacity is not None and capacity < request.length:
        even = request.table.top_k * request.length / plan.sizes["experts"]
        yield _draft(
            plan,
            "info",
            f"capacity factor {request.table.capacity_factor:g}: an expert takes {capacity:,} of the {request.length:,} "
            f"tokens of a row (even share: {even:,.10g}); later tokens are dropped, the same ones under every layout",
            "nothing; with --set capacity_factor=none no token is dropped",
        )
    if request.expert_buffer is None and buffer_rows < traffic.most:
        yield _draft(
            plan,
            "info",
            f"a device has room for {buffer_rows:,} assignments, {buffer_rows / traffic.assignments:.3g} times its even share of "
            f"{even_share}, and may receive {traffic.most:,}; where it receives more, its buffers grow. {_chance(traffic, buffer_rows)}",
            "nothing; --expert-buffer 2 has room for twice the even share from the first step on, and a run stops where a device receives more",
        )
    elif buffer_rows < traffic.most:
        yield _draft(
            plan,
            "warning",
            f"a device has capacity for {buffer_rows:,} assignments (even share: {even_share}) and may receive "
            f"{traffic.most:,}; a run stops where a device receives more than its capacity",
            f"{traffic.most:,}: omit --expert-buffer, so that buffers grow, or monitor the load of the experts. {_chance(traffic, buffer_rows)}",
        )
    elif traffic.most > traffic.assignments:
        yield _draft(
            plan,
            "info",
            f"a device has capacity for all {traffic.most:,} assignments that its experts may receive, "
            f"{traffic.most / traffic.assignments:.3g} times its even share of {even_share}",
            "nothing; --expert-buffer 2 sets a capacity of twice the even share, and a run stops where a device receives more",
        )


def _chance(traffic: Traffic, buffer_rows: int) -> str:
    """How often a router exceeds a buffer that chooses every expert as often as any other."""
    exponent = min(MOST_ZEROS, floor(-traffic.log_chance_of_more(buffer_rows) / log(10)))
    if exponent < 1:
        return "Where every expert is as likely as any other, that happens by chance"
    return f"Where every expert is as likely as any other, that is in less than one of 10^{exponent} layers and microbatches"


def _draft(plan: Plan, severity: Severity, found: str, needed: str) -> Draft:
    row, traffic = plan.by_name[plan.request.table.names.received], traffic_of(plan.request, plan.mesh)
    buffer_rows = traffic.buffer_rows(plan.request.expert_buffer)
    # Buffers are those of one microbatch.
    held = (
        sum(t.bytes_per_device for t in plan.activations if "slots" in t.in_use.logical_axes)
        / plan.request.microbatches
    )
    return Draft(
        finding=Finding(
            code="SW405",
            severity=severity,
            where=f"{row.name} of {plan.request.table.name}",
            tensor=row.name,
            notation=str(row.in_use),
            mark=place_in(row.in_use, row.in_use.logical_axes.index("slots")),
            found=found,
            needed=needed,
            cost=f"{bytes_text(held)} a device for the buffers of one layer; "
            f"{bytes_text(held * traffic.assignments / buffer_rows)} with capacity for the even share only",
        )
    )
