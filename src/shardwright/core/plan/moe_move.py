"""Tokens or weights: the collectives by which tokens go to their experts and back, and what `move: {moe: auto}` chooses, by the bytes
that one device would send for one layer of a step.

Per layer, over the N devices of the expert axes, with T tokens of width M on a device, k experts a token, and the
weights W of the experts that one device holds:

| option | one collective sends | forward | recomputed | backward | which collectives |
|---|---|---|---|---|---|
| all-to-all | T k M (N-1)/N | 2 | 2 | 2 | each token-expert assignment is dispatched and its result combined |
| ring | T M (N-1) | 2 | 1 | 2 | all tokens are gathered, the outputs reduce-scattered; the output of the layer is not recomputed |
| weights | W (N-1) | 1 | 1 | 1 | the weights are gathered, their gradient is reduce-scattered |

Where a recipe sends tokens to experts as codes, these collectives send fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from shardwright.core.layout.auto import AutoChoice
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES, Move
from shardwright.core.plan.movement import ReshardKind, collectives, elements_per_device
from shardwright.core.plan.plan import Phase, PlannedCollective, TensorPlan, layers_on_device
from shardwright.core.policies.runs import runs_of
from shardwright.core.quantization.dispatch import arrays_of_rows, sent_as_codes, sent_rows
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.recipes.recipe import Quantizer
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import expert_axes

COLLECTIVES: Mapping[str, tuple[int, int, int]] = {"all-to-all": (2, 2, 2), "ring": (2, 1, 2), "weights": (1, 1, 1)}
"""The number of collectives in the forward pass, in the recomputation, and in the backward pass."""


def collectives_per_layer(option: str, request: Request) -> int:
    """The number of collectives in one layer of a step."""
    forward, recomputed, backward = COLLECTIVES[option]
    runs = runs_of(request.table, request.remat)
    again = any("moe.dispatched" in run.again for run in runs)
    if option == "weights":
        again = any(run.gathers_again for run in runs)
    return forward + backward + (recomputed if again else 0)


def collectives_of_experts(
    request: Request,
    mesh: Mesh,
    by_name: Mapping[str, TensorPlan],
    move: Move,
    quantized: Sequence[QuantizedWeight],
    *,
    again: Fraction,
) -> Iterator[PlannedCollective]:
    """The dispatch of tokens to their experts, or the combine. ``again``: the share of layers whose backward pass repeats it.

    | option | what is sent |
    |---|---|
    | all-to-all | each token-expert assignment, and nothing else |
    | ring | each token once, whatever its number of experts: tokens are gathered over the expert axes with their experts and routing weights, each device sums the outputs of its own experts, and the sums are reduce-scattered |
    | weights | no token |

    What goes to experts is sent as codes and scales where the recipe has that (``core/quantization/dispatch.py``).
    """
    axes, dispatch = expert_axes(request.layout, mesh), move.kind == "dispatch"
    if not axes:
        return
    forward = backward = _each("all-to-all", (move.source if dispatch else move.target,))
    if request.layout.move_moe == "ring" and dispatch:
        gathered = ("router.grouped", "router.grouped_experts", "router.weights")
        forward, backward = _each("all-gather", gathered), _each("reduce-scatter", (gathered[0], gathered[2]))
    elif request.layout.move_moe == "ring":
        combined = ("router.combined",)
        forward, backward = _each("reduce-scatter", combined), _each("all-gather", combined)
    phases: Mapping[Phase, Sequence[tuple[ReshardKind, str]]]
    phases = {"forward": forward, "recompute": forward if again else (), "backward": backward}
    for phase, found in phases.items():
        for kind, name in found:
            for one in _sent(request, mesh, by_name[name], phase, kind, quantized) if name in by_name else ():
                yield replace(one, count_per_step=ceil(one.count_per_step * again)) if phase == "recompute" else one


def _sent(
    request: Request,
    mesh: Mesh,
    row: TensorPlan,
    phase: Phase,
    kind: ReshardKind,
    quantized: Sequence[QuantizedWeight],
) -> Iterator[PlannedCollective]:
    """One move of an activation in all layers: of its rows as they are, and in layers that quantize them of codes and of scales."""
    axes, width = expert_axes(request.layout, mesh), row.shape[-1]
    shape = dict(zip(row.in_use.logical_axes, row.shape, strict=True))
    shape["batch"] //= request.microbatches
    held = row.in_use if kind == "all-to-all" else row.in_use.without(axes)
    rows = elements_per_device(held, shape, mesh) // width
    layers = layers_on_device(request, mesh, row)
    of_codes, arrays = sent_as_codes(request, mesh, quantized, row.name, phase, width)
    sent = [(None, DTYPE_BYTES[row.dtype] * width, layers - of_codes), *((*array, of_codes) for array in arrays)]
    for dtype, row_bytes, num in sent:
        for one in collectives(kind, axes, rows * row_bytes, mesh) if num else ():
            yield PlannedCollective(
                component="moe",
                phase=phase,
                kind=one.kind,
                axes=one.axes,
                bytes_per_device=one.elements_per_device,
                count_per_step=num * request.microbatches,
                tensors=(row.name,),
                subgroup=one.subgroup,
                ragged=kind == "all-to-all",
                dtype=dtype,
            )


def _each(kind: ReshardKind, tensors: Iterable[str]) -> Sequence[tuple[ReshardKind, str]]:
    return tuple((kind, tensor) for tensor in tensors)


def choose_moe_move(request: Request, mesh: Mesh) -> tuple[Layout, tuple[AutoChoice, ...]]:
    """The layout with `auto` replaced by the option that sends the fewest bytes, and that choice with all costs."""
    layout = request.layout
    if layout.move_moe != "auto":
        return layout, ()
    wire = moe_wire_bytes(request, mesh)
    if not wire:
        return replace(layout, move_moe="all-to-all"), ()
    chosen = min(wire, key=lambda option: wire[option])
    return replace(layout, move_moe=chosen), (AutoChoice(what="move.moe", chosen=chosen, wire_bytes=wire),)


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
    saved = _saved_by_codes(request, table.sizes["embed"] * width)
    return {
        option: round((collectives_per_layer(option, request) - saved.get(option, 0.0)) * sent)
        for option, sent in once.items()
    }


def _saved_by_codes(request: Request, row_bytes: int) -> Mapping[str, float]:
    """What codes save of the collectives of a layer, in multiples of one that sends rows of ``row_bytes``: of each dispatch, and of the
    combine's transpose in an all-to-all."""
    sent = sent_rows(request.precision)

    def share(quantizer: Quantizer | None) -> float:
        if quantizer is None:
            return 0.0
        coded = sum(one.row_bytes for one in arrays_of_rows(quantizer, request.table.sizes["embed"]))
        return 1 - coded / row_bytes

    passes = 1 + any("moe.dispatched" in run.again for run in runs_of(request.table, request.remat))
    tokens = passes * share(sent.tokens)
    return {"all-to-all": tokens + share(sent.cotangents), "ring": tokens}
