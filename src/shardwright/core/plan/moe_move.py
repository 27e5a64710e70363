"""Tokens or weights: the collectives by which tokens go to their experts and back, and what `move: {moe: auto}` chooses, by the bytes
that one device would send for one layer of a step.

Per layer, over the N devices of the expert axes, with T tokens of width M on a device, k experts a token, and the
weights W of the experts that one device holds:

| option | one collective sends | forward | recomputed | backward | which collectives |
|---|---|---|---|---|---|
| all-to-all | T k M (N-1)/N | 2 | 2 | 2 | each token-expert assignment is dispatched and its result combined |
| two-hops, over D nodes | T d M (D-1)/D | 2 | 1 | 2 | each token is sent once to each of its d nodes, and its sum in the node back; the sum of nodes is not recomputed |
| and in a node of N/D | T k M (N-D)/N | 2 | 2 | 2 | as all-to-all |
| ring | T M (N-1) | 2 | 1 | 2 | all tokens are gathered, the outputs reduce-scattered; the output of the layer is not recomputed |
| weights | W (N-1) | 1 | 1 | 1 | the weights are gathered, their gradient is reduce-scattered |

Where a recipe sends tokens to experts as codes, these collectives send fewer bytes. d is that of an even routing
(``core/resolution/token_hops.py``). With a token to its nodes go the numbers and the routing weights of its experts, 8 k bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

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
from shardwright.core.resolution.request import FLOATS, Request
from shardwright.core.resolution.token_hops import TWO_HOPS, TokenHop, nodes_of_a_token, token_hops


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCollectives:
    """Equal collectives of one layer, in all passes of a step: ``times`` of them. ``num_bytes``: of the larger of operand and result of each;
    ``saved``: what codes save of them together, in multiples of one."""

    kind: ReshardKind
    axes: tuple[str, ...]
    num_bytes: float
    times: int
    saved: float = 0.0

    def sent(self, mesh: Mesh) -> float:
        """Bytes that a device sends."""
        size = mesh.size(self.axes)
        return (self.times - self.saved) * self.num_bytes * (size - 1) / size


def collectives_of_experts(
    request: Request,
    mesh: Mesh,
    by_name: Mapping[str, TensorPlan],
    move: Move,
    quantized: Sequence[QuantizedWeight],
    *,
    again: Callable[[Move], Fraction],
) -> Iterator[PlannedCollective]:
    """The dispatch of tokens to their experts, or the combine. ``again``: the share of layers whose backward pass repeats a move.

    | option | what is sent |
    |---|---|
    | all-to-all | each token-expert assignment, and nothing else |
    | two-hops | each token once to each of its nodes, with its experts and routing weights, and inside of a node each assignment; back, the sum of a token's outputs in a node |
    | ring | each token once, whatever its number of experts: tokens are gathered over the expert axes with their experts and routing weights, each device sums the outputs of its own experts, and the sums are reduce-scattered |
    | weights | no token |

    What goes to experts is sent as codes and scales where the recipe has that (``core/quantization/dispatch.py``).
    """
    *before, last = token_hops(request, mesh)
    if not last.axes:
        return
    dispatch, ring = move.kind == "dispatch", request.layout.move_moe == "ring"
    names = request.table.names
    of_tokens = (names.tokens, names.token_experts, names.token_weights) if dispatch else (names.combined,)
    # The gradients of the routing weights need the experts' outputs, so their combine is recomputed. Sums of tokens only leave the layer.
    leaves = replace(move, ends_layer=not dispatch)
    rows = move.source if dispatch else move.target
    found: list[tuple[_Moved, _Moved]] = [
        (_Moved("all-to-all", last, rows, again(move)), _Moved("all-to-all", last, rows))
    ]
    if ring:
        there, back = ("all-gather", "reduce-scatter") if dispatch else ("reduce-scatter", "all-gather")
        found = [(_Moved(there, last, name, again(leaves)), _Moved(back, last, name)) for name in of_tokens]
    for hop in before:
        for name in of_tokens:
            # A token is sent again for the rows that are made of it; what is known of it, where that is not kept.
            made = rows if name == of_tokens[0] and dispatch else name
            found.append(
                (
                    _Moved("all-to-all", hop, name, again(replace(leaves, target=made) if dispatch else leaves)),
                    _Moved("all-to-all", hop, name),
                )
            )
    for forward, backward in found:
        row = by_name.get(forward.tensor)
        phases: Mapping[Phase, _Moved] = {"forward": forward, "recompute": forward, "backward": backward}
        for phase, moved in phases.items():
            share = moved.again if phase == "recompute" else 1
            if row is None or not share or (phase == "backward" and row.dtype not in FLOATS):
                continue
            for planned in _sent(request, mesh, row, phase, moved, quantized):
                yield replace(planned, count_per_step=ceil(planned.count_per_step * share))


class _Moved(NamedTuple):
    """An activation that is sent in one hop. ``again``: the share of layers whose backward pass repeats it."""

    kind: ReshardKind
    hop: TokenHop
    tensor: str
    again: Fraction = Fraction(0)


def _sent(
    request: Request,
    mesh: Mesh,
    row: TensorPlan,
    phase: Phase,
    moved: _Moved,
    quantized: Sequence[QuantizedWeight],
) -> Iterator[PlannedCollective]:
    """One move of an activation in all layers: of its rows as they are, and in layers that quantize them of codes and of scales."""
    axes, width, rows = moved.hop.axes, row.shape[-1], moved.hop.even_rows
    if moved.kind != "all-to-all":
        shape = dict(zip(row.in_use.logical_axes, row.shape, strict=True))
        shape["batch"] //= request.microbatches
        rows = elements_per_device(row.in_use.without(axes), shape, mesh) // width
    layers = layers_on_device(request, mesh, row)
    of_codes, arrays = sent_as_codes(request, mesh, quantized, row.name, phase, width)
    sent = [(None, DTYPE_BYTES[row.dtype] * width, layers - of_codes), *((*array, of_codes) for array in arrays)]
    for dtype, row_bytes, num in sent:
        for collective in collectives(moved.kind, axes, rows * row_bytes, mesh) if num else ():
            yield PlannedCollective(
                component="moe",
                phase=phase,
                kind=collective.kind,
                axes=collective.axes,
                bytes_per_device=collective.elements_per_device,
                count_per_step=num * request.microbatches,
                tensors=(row.name,),
                subgroup=collective.subgroup,
                ragged=moved.kind == "all-to-all",
                dtype=dtype,
            )


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
    return {
        option: round(sum(hop.sent(mesh) for hop in hops)) for option, hops in option_collectives(request, mesh).items()
    }


def option_collectives(request: Request, mesh: Mesh) -> Mapping[str, tuple[OptionCollectives, ...]]:
    """The collectives of one layer under each option; none where there is nothing to move. The numbers of experts and routing weights
    that go with tokens are left out: they are small."""
    layout, table = request.layout, request.table
    experts = [w for w in table.weights if w.component == "moe" and "experts" in w.logical_axes]
    axes = mesh.larger_than_one(layout.axes_with("expert", "moe"))
    if not experts or not axes or table.top_k is None:
        return {}
    n = mesh.size(axes)
    spread = mesh.size(
        a for a in mesh.names if {"batch", "length"} & set(layout.dims_sharded_by(a, "router")) or a in axes
    )
    width = DTYPE_BYTES[request.dtype]
    token_bytes = request.batch // request.microbatches * request.length / spread * table.sizes["embed"] * width
    by_layer = {w.num for w in experts}
    elements = sum(w.num_parameters for w in experts) / max(by_layer)
    tensor = mesh.size(a for a in mesh.names if layout.role(a, "moe") == "tensor")
    held = elements / n / tensor * width
    runs = runs_of(table, request.remat)
    again = any(table.names.received in run.again for run in runs)
    tokens, cotangents = _saved_by_codes(request, table.sizes["embed"] * width, 1 + again)

    row_bytes = token_bytes * table.top_k

    def rows(axes: tuple[str, ...]) -> OptionCollectives:
        saved = tokens + cotangents
        return OptionCollectives(kind="all-to-all", axes=axes, num_bytes=row_bytes, times=4 + 2 * again, saved=saved)

    def of_tokens(kind: ReshardKind, axes: tuple[str, ...], copies: float) -> OptionCollectives:
        return OptionCollectives(kind=kind, axes=axes, num_bytes=token_bytes * copies, times=4 + again, saved=tokens)

    found: dict[str, tuple[OptionCollectives, ...]] = {
        "all-to-all": (rows(axes),),
        "ring": (of_tokens("all-gather", axes, n),),
        "weights": (
            OptionCollectives(
                kind="all-gather", axes=axes, num_bytes=held * n, times=2 + any(run.gathers_again for run in runs)
            ),
        ),
    }
    if len(axes) > 1:
        nodes = nodes_of_a_token(table, mesh.size(axes[:1]))
        found[TWO_HOPS] = (of_tokens("all-to-all", axes[:1], nodes), rows(axes[1:]))
    return found


def _saved_by_codes(request: Request, row_bytes: int, passes: int) -> tuple[float, float]:
    """What codes save of the collectives of a layer, in multiples of one that sends rows of ``row_bytes``: of the dispatches in ``passes``
    passes, and of the combine's transpose in an all-to-all."""
    sent = sent_rows(request.precision, request.table.names)

    def share(quantizer: Quantizer | None) -> float:
        if quantizer is None:
            return 0.0
        coded = sum(array.row_bytes for array in arrays_of_rows(quantizer, request.table.sizes["embed"]))
        return 1 - coded / row_bytes

    return passes * share(sent.tokens), share(sent.cotangents)
