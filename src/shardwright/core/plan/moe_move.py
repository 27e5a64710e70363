"""Tokens or weights: what `move: {moe: auto}` chooses, by the bytes that one device would send for one layer of a step.

Per layer, over the N devices of the expert axes, with T tokens of width M on a device, k experts a token, and the
weights W of the experts that one device holds:

| option | one collective sends | forward | recomputed | backward | which collectives |
|---|---|---|---|---|---|
| all-to-all | T k M (N-1)/N | 2 | 2 | 2 | each token-expert assignment is dispatched and its result combined |
| ring | T M (N-1) | 2 | 1 | 2 | all tokens are gathered, the outputs reduce-scattered; the output of the layer is not recomputed |
| weights | W (N-1) | 1 | 1 | 1 | the weights are gathered, their gradient is reduce-scattered |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import MoeMove
from shardwright.core.resolution.request import Request

COLLECTIVES: Mapping[str, tuple[int, int, int]] = {"all-to-all": (2, 2, 2), "ring": (2, 1, 2), "weights": (1, 1, 1)}
"""The number of collectives in the forward pass, in the recomputation, and in the backward pass."""


def collectives_per_layer(option: str, request: Request) -> int:
    """The number of collectives in one layer of a step."""
    forward, recomputed, backward = COLLECTIVES[option]
    return forward + backward + (recomputed if request.remat != "none" else 0)


def choose_moe_move(request: Request, mesh: Mesh) -> tuple[Layout, tuple[MoeMove, ...]]:
    """The layout with `auto` replaced by the option that sends the fewest bytes, and that choice with all costs."""
    layout = request.layout
    if layout.move_moe != "auto":
        return layout, ()
    wire = moe_wire_bytes(request, mesh)
    if not wire:
        return replace(layout, move_moe="all-to-all"), ()
    chosen = min(wire, key=lambda option: wire[option])
    return replace(layout, move_moe=chosen), (MoeMove(what="move.moe", chosen=chosen, wire_bytes=wire),)


def moe_wire_bytes(request: Request, mesh: Mesh) -> dict[str, int]:
    """Bytes that one device sends per layer of a step, summed over all passes; empty where there is nothing to move."""
    layout, table = request.layout, request.table
    experts = [w for w in table.weights if w.component == "moe" and "experts" in w.logical_axes]
    axes = mesh.larger_than_one(layout.axes_with("expert", "moe"))
    if not experts or not axes or table.top_k is None:
        return {}
    n = mesh.size(axes)
    spread = mesh.size(
        a for a in mesh.names if {"batch", "length"} & set(layout.dims_sharded_by(a, "router")) or a in axes
    )
    tokens = request.batch // request.microbatches * request.length / spread
    width = DTYPE_BYTES[request.dtype]
    by_layer = {w.num for w in experts}
    elements = sum(w.num_parameters for w in experts) / max(by_layer)
    tensor = mesh.size(a for a in mesh.names if layout.role(a, "moe") == "tensor")
    held = elements / n / tensor * width
    token_bytes = tokens * table.sizes["embed"] * width
    once = {
        "all-to-all": token_bytes * table.top_k * (n - 1) / n,
        "ring": token_bytes * (n - 1),
        "weights": held * (n - 1),
    }
    return {option: round(collectives_per_layer(option, request) * sent) for option, sent in once.items()}
