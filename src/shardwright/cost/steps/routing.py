"""How many rows the experts of a device receive in a step whose time is estimated, in multiples of its even share.

| routing | rows of a device | what they decide |
|---|---|---|
| even | those that its own tokens have: ``EVEN`` | the time of a step, its flops, and the bytes that it sends |
| what buffers hold | between the two: ``Traffic.buffer_rows`` | the memory of a plan |
| one device gets all | as many as its buffer holds (``shares_of_one``) after it has grown (``core/planning.py``: ``with_all_to_one``) | the longest time of a step, and the memory that is printed beside the plan's |

Kernels multiply received rows and no others (``core/plan/expert_kernels.py``). What lies between products touches no others either, but in
programs of JAX, whose buffers have a static size (``IN_VAIN``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Plan, PlannedCollective, TensorPlan
from shardwright.core.resolution.resolve import expert_axes, traffic_of
from shardwright.core.resolution.token_hops import nodes_of_a_token, rows_sent_on, token_hops

EVEN = 1.0

PASSES_OF_A_HOP = 4.0
"""How often a token is read or written in memory for an exchange with nodes, forward: rows are made of tokens, and sums of nodes are added."""

SENT_ON_IN_VAIN: Mapping[str, tuple[int, int]] = {"dispatched": (2, 1), "returned": (1, 4)}
"""The same of rows that a device sends on inside a node: they are gathered by index for all places of its buffer, and summed for all of
its tokens (``engine_jax/experts/rows.py``)."""

IN_VAIN: Mapping[tuple[str, str], Mapping[str, tuple[int, int]]] = {
    ("switch", "all-to-all"): {"expert_hidden": (2, 0), "expert_outputs": (1, 0)},
    ("switch", "ring"): {"received": (2, 0), "expert_hidden": (2, 0), "expert_outputs": (1, 3)},
    ("switch", "two-hops"): {"expert_hidden": (2, 0), "expert_outputs": (1, 0), **SENT_ON_IN_VAIN},
    ("torus", "all-to-all"): {"received": (0, 3), "expert_hidden": (3, 6)},
    ("torus", "two-hops"): {"received": (0, 3), "expert_hidden": (3, 6), **SENT_ON_IN_VAIN},
    ("torus", "ring"): {"received": (2, 3), "expert_hidden": (3, 6), "expert_outputs": (0, 3)},
}
"""How often JAX's program reads or writes the rows of a buffer that nobody sent, forward and backward, by network and by how tokens move, of the
fields of ``TensorNames``.
The loop over blocks fills gate, up and the output first; around the kernel of TPUs SwiGLU and a sum have the whole buffer; a ring gathers
by index into all of it. Copies before and after an all-to-all end with the rows received (``engine_jax/experts/exchange.py``)."""


def shares_of_one(plan: Plan) -> float:
    """The most rows that one device can receive in its buffer, in multiples of its even share.

    >>> from shardwright import Request, load_layout, make_plan, model_table
    >>> from shardwright.core.planning import with_all_to_one
    >>> request = Request(layout=load_layout("ep"), table=model_table("mixtral-8x7b"), batch=8, length=4096, devices=8)
    >>> [shares_of_one(plan) for plan in (make_plan(request), with_all_to_one(make_plan(request)))]
    [1.25, 4.0]
    """
    if plan.request.table.top_k is None or plan.request.table.names.received not in plan.by_name:
        return EVEN
    traffic = traffic_of(plan.request, plan.mesh)
    return max(EVEN, traffic.buffer_rows(plan.request.expert_buffer) / traffic.assignments)


def filled_share(plan: Plan, tensor: TensorPlan, shares: float) -> float:
    """The part of an activation's bytes that is touched: of a buffer for rows of experts the rows that are received, or sent on."""
    if plan.request.table.top_k is None:
        return 1.0
    if "slots" not in tensor.in_use.logical_axes and tensor.name not in rows_sent_on(plan.request, plan.mesh):
        return 1.0
    row_bytes = DTYPE_BYTES[tensor.dtype] * ceil(tensor.shape[-1] / plan.mesh.size(tensor.in_use.dims[-1].axes))
    rows = shares * traffic_of(plan.request, plan.mesh).assignments * plan.request.microbatches
    return min(1.0, rows * row_bytes / tensor.bytes_per_device)


def bytes_in_vain(plan: Plan, tensor: TensorPlan, network: str, shares: float) -> tuple[float, float]:
    """Bytes of one layer's buffer for rows that nobody sent, forward and backward, in a program of JAX."""
    names, touched = plan.request.table.names, IN_VAIN.get((network, plan.request.layout.move_moe), {})
    forward, backward = next((times for of, times in touched.items() if getattr(names, of) == tensor.name), (0, 0))
    rest = tensor.bytes_per_device * (1.0 - filled_share(plan, tensor, shares)) if forward or backward else 0.0
    return forward * rest, backward * rest


def is_of_experts(plan: Plan, weight: str) -> bool:
    """Whether a weight multiplies the rows of experts."""
    return "experts" in plan.request.table.weight(weight).logical_axes


def sent_times(plan: Plan, collective: PlannedCollective, shares: float) -> float:
    """How many times as long an exchange of tokens takes as in an even routing: one device receives all that the others send, which is
    each token once where it is sent to nodes."""
    if not collective.ragged or shares <= EVEN:
        return EVEN
    hop = next(hop for hop in token_hops(plan.request, plan.mesh) if set(hop.axes) == set(collective.axes))
    return min(shares, max(EVEN, hop.buffer_rows / hop.even_rows))


def once_share(plan: Plan, collective: PlannedCollective) -> float:
    """Of an exchange's rows those that are sent where each device gets a token once, whichever of its experts want it."""
    if not collective.ragged or plan.request.table.top_k is None:
        return 1.0
    hops = token_hops(plan.request, plan.mesh)
    if set(hops[-1].axes) != set(collective.axes):
        # What nodes are sent is sent once already.
        return 1.0
    devices = plan.mesh.size(expert_axes(plan.request.layout, plan.mesh))
    return min(1.0, nodes_of_a_token(plan.request.table, devices) / plan.request.table.top_k)


def bytes_between_hops(plan: Plan) -> float:
    """Bytes that one layer's tokens move in memory beside their exchange with nodes, forward."""
    before = token_hops(plan.request, plan.mesh)[:-1] if plan.request.table.top_k is not None else ()
    width = plan.request.table.sizes.get("embed", 0) * DTYPE_BYTES[plan.request.dtype] * plan.request.microbatches
    return sum(PASSES_OF_A_HOP * hop.even_rows * width for hop in before)
