"""Tokens or weights: what `move: {moe: auto}` takes, by the bytes that one device would send for one layer and pass.

Per layer, over the N devices of the expert axes, with T tokens of width M on a device, k experts a token, and the
weights W of the experts that one device holds:

| option | sent forward | sent backward | source |
|---|---|---|---|
| all-to-all | 2 T k M (N-1)/N | the same | each choice of a token goes out and its result comes back |
| ring | T M (N-1) gathered, T M (N-1) scattered | the same | all tokens are gathered, the outputs reduce-scattered |
| weights | W (N-1) gathered | W (N-1) scattered | the gradient of the gathered weights |
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.layout import Layout
from shardwright.core.mesh import Mesh
from shardwright.core.plan import Choice
from shardwright.core.request import Request
from shardwright.core.table import DTYPE_BYTES


def choose_moe_move(request: Request, mesh: Mesh) -> tuple[Layout, tuple[Choice, ...]]:
    """The layout with `auto` replaced by the option that sends the fewest bytes, and the choice with all costs."""
    layout = request.layout
    if layout.move_moe != "auto":
        return layout, ()
    wire = moe_wire_bytes(request, mesh)
    if not wire:
        return replace(layout, move_moe="all-to-all"), ()
    chosen = min(wire, key=lambda option: wire[option])
    return replace(layout, move_moe=chosen), (Choice(what="move.moe", chosen=chosen, wire_bytes=wire),)


def moe_wire_bytes(request: Request, mesh: Mesh) -> dict[str, int]:
    """Bytes one device sends per layer, forward and backward together; empty where there is nothing to move."""
    layout, table = request.layout, request.table
    experts = [w for w in table.weights if w.component == "moe" and "experts" in w.logical_axes]
    axes = mesh.larger_than_one(layout.axes_with("expert", "moe"))
    if not experts or not axes or table.top_k is None:
        return {}
    n = mesh.size(axes)
    spread = mesh.size(a for a in mesh.names if {"batch", "length"} & set(layout.cut_by(a, "router")) or a in axes)
    tokens = request.batch // request.micro_steps * request.length / spread
    width = DTYPE_BYTES[request.dtype]
    by_layer = {w.num for w in experts}
    elements = sum(w.num_parameters for w in experts) / max(by_layer)
    cut = mesh.size(a for a in mesh.names if layout.role(a, "moe") == "tensor")
    held = elements / n / cut * width
    token_bytes = tokens * table.sizes["embed"] * width
    return {
        "all-to-all": round(4 * token_bytes * table.top_k * (n - 1) / n),
        "ring": round(4 * token_bytes * (n - 1)),
        "weights": round(2 * held * (n - 1)),
    }
