"""SW405: what becomes of tokens that choose a full expert, and of the room that is kept for those that may come."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding, Severity
from shardwright.core.layout.wording import bytes_text
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.resolve import capacity_of, traffic_of

DISPATCHED = "moe.dispatched"


def expert_buffer(plan: Plan) -> Iterator[Draft]:
    """Drafts for a model with experts: whom it drops, and what room a device has for the choices that come to it."""
    request, tensors = plan.request, plan.by_name
    if request.table.top_k is None or DISPATCHED not in tensors:
        return
    traffic = traffic_of(request, plan.mesh)
    room, share = traffic.buffer_rows(request.expert_buffer), f"its even share being {traffic.assignments:,}"
    capacity = capacity_of(request.table, request.length)
    if capacity is not None and capacity < request.length:
        even = request.table.top_k * request.length / plan.sizes["experts"]
        yield _draft(
            plan,
            "info",
            f"capacity factor {request.table.capacity_factor:g}: an expert takes {capacity:,} of the {request.length:,} "
            f"tokens of a row, its even share being {even:g}; what comes after them is dropped, on every layout alike",
            "nothing; --set capacity_factor=none drops no token",
        )
    if room < traffic.most:
        yield _draft(
            plan,
            "warning",
            f"a device has room for {room:,} choices of tokens, {share}, and {traffic.most:,} may come; a run stops "
            "where more come than there is room for",
            f"{traffic.most:,}: leave --expert-buffer out, or watch the load of the experts",
        )
    elif traffic.most > traffic.assignments:
        yield _draft(
            plan,
            "info",
            f"a device has room for all {traffic.most:,} choices of tokens that may come to its experts, {share}: "
            f"{traffic.most / traffic.assignments:.3g} times as many",
            "nothing; --expert-buffer 2 keeps room for twice the even share, and stops the run where more come",
        )


def _draft(plan: Plan, severity: Severity, found: str, needed: str) -> Draft:
    row, traffic = plan.by_name[DISPATCHED], traffic_of(plan.request, plan.mesh)
    room = traffic.buffer_rows(plan.request.expert_buffer)
    held = sum(t.bytes_per_device for t in plan.activations if "slots" in t.in_use.logical_axes)
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
            f"{bytes_text(held * traffic.assignments / room)} with room for the even share and no more",
        )
    )
