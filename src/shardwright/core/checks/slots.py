"""SW405: what becomes of tokens that choose a full expert, and what it costs that none is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.draft import Draft
from shardwright.core.finding import Finding
from shardwright.core.notation import place_in
from shardwright.core.plan import Plan
from shardwright.core.resolve import capacity_of
from shardwright.core.wording import bytes_text

DISPATCHED = "moe.dispatched"


def slots(plan: Plan) -> Iterator[Draft]:
    """One draft for a model with experts: how many slots its tokens have, and whether they are enough."""
    table, tensors = plan.request.table, plan.by_name
    if table.top_k is None or DISPATCHED not in tensors:
        return
    row = tensors[DISPATCHED]
    sizes = plan.sizes
    experts, groups, per_group = sizes["experts"], sizes["groups"], sizes["slots"]
    places, choices = experts * groups * per_group, table.top_k * plan.request.length
    slot_bytes = sum(t.bytes_per_device for t in plan.activations if "slots" in t.in_use.logical_axes)
    capacity = capacity_of(table, plan.request.length)
    if capacity is None:
        found = (
            f"no token is dropped, so each of {experts} experts has a slot for each of the {per_group:,} tokens of a group: "
            f"{places:,} slots a row for {choices:,} choices, {places / choices:.3g} times as many"
        )
        needed = "nothing; where tokens may be dropped, --set capacity_factor=1.25 gives each expert 1.25 times its even share"
    elif capacity >= plan.request.length:
        # An expert that takes a whole row drops nothing, and its slots were asked for by number.
        return
    else:
        found = (
            f"capacity factor {table.capacity_factor:g}: an expert takes {capacity:,} of the {plan.request.length:,} tokens of "
            f"a row, its even share being {choices / experts:g}; what comes after them is dropped, on every layout alike"
        )
        needed = "nothing; --set capacity_factor=none drops no token"
    yield Draft(
        finding=Finding(
            code="SW405",
            severity="info",
            where=f"{row.name} of {table.name}",
            tensor=row.name,
            notation=str(row.in_use),
            mark=place_in(row.in_use, row.in_use.logical_axes.index("slots")),
            found=found,
            needed=needed,
            cost=f"{bytes_text(slot_bytes)} a device for one layer's slots; "
            f"{bytes_text(slot_bytes * choices / places)} with a slot for each choice and no more",
        )
    )
