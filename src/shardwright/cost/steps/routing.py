"""How many rows the experts of a device receive in a step whose time is estimated, in multiples of its even share.

| routing | rows of a device | what they decide |
|---|---|---|
| even | those that its own tokens have: ``EVEN`` | the time of a step, its flops, and the bytes that it sends |
| one device gets all | as many as its buffer holds (``shares_of_one``) | the longest time of a step, and the memory of every plan |

Kernels multiply received rows and no others (``core/plan/expert_kernels.py``), and what lies between products touches no others.
"""

from __future__ import annotations

from shardwright.core.plan.plan import Plan, PlannedCollective, TensorPlan
from shardwright.core.resolution.resolve import traffic_of

EVEN = 1.0


def shares_of_one(plan: Plan) -> float:
    """The most rows that one device can receive, in multiples of its even share: of a run that does not stop at a full buffer.

    >>> from shardwright import Request, load_layout, make_plan, model_table
    >>> request = Request(layout=load_layout("ep"), table=model_table("mixtral-8x7b"), batch=8, length=4096, devices=8)
    >>> shares_of_one(make_plan(request))
    4.0
    """
    if plan.request.table.top_k is None or "moe.dispatched" not in plan.by_name:
        return EVEN
    traffic = traffic_of(plan.request, plan.mesh)
    return max(EVEN, traffic.buffer_rows(plan.request.expert_buffer) / traffic.assignments)


def filled_share(plan: Plan, tensor: TensorPlan, shares: float) -> float:
    """The part of an activation's bytes that is touched: of a buffer for rows of experts the rows that are received."""
    if plan.request.table.top_k is None or "slots" not in tensor.in_use.logical_axes:
        return 1.0
    traffic = traffic_of(plan.request, plan.mesh)
    return min(1.0, shares * traffic.assignments / traffic.buffer_rows(plan.request.expert_buffer))


def is_of_experts(plan: Plan, weight: str) -> bool:
    """Whether a weight multiplies the rows of experts."""
    return "experts" in plan.request.table.weight(weight).logical_axes


def sent_times(collective: PlannedCollective, shares: float) -> float:
    """How many times as long an exchange of tokens takes as in an even routing: one device receives all that the others send."""
    return shares if collective.ragged else 1.0
