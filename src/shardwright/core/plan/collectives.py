"""The collectives of one training step, predicted from the specs and the table's moves alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil
from typing import Literal

from shardwright.core.layout.layout import Layout
from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES, ModelTable, Move
from shardwright.core.plan.fsdp_groups import (
    FsdpGroup,
    WeightOfLayer,
    component_of,
    groups_of,
    trained,
    update_groups,
    weight_of_layer,
)
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.moe_move import collectives_of_experts
from shardwright.core.plan.movement import Collective, movement
from shardwright.core.plan.plan import Phase, PlannedCollective, TensorPlan, layers_on_device
from shardwright.core.plan.resharding import (
    Resharding,
    WeightMoves,
    moves_of,
    resharding,
    resharding_of_rows,
)
from shardwright.core.policies.repeated import gathers_again, layers_gathered_again, moved_again
from shardwright.core.policies.runs import Run
from shardwright.core.quantization.links import copy_phases
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.quantization.reductions import AMAX_BYTES, AMAX_DTYPE, amax_reductions
from shardwright.core.resolution.request import FLOATS, Request


def step_collectives(
    request: Request, mesh: Mesh, tensors: Sequence[TensorPlan], quantized: Sequence[QuantizedWeight] = ()
) -> tuple[PlannedCollective, ...]:
    """Every collective of a step, in the order of component, phase and axes. Equal collectives are one row with a count."""
    by_name = {tensor.name: tensor for tensor in tensors}
    found: list[PlannedCollective] = []
    runs = kept_runs(request, mesh, tensors)
    weights = [tensor for tensor in tensors if tensor.kind == "weight"]
    if request.properties.gathers_together:
        found += _of_groups(request, mesh, weights, runs, quantized)
    else:
        for tensor in weights:
            found += _of_weight(request, mesh, tensor, runs, quantized)
    for move in request.table.moves:
        if move.source in by_name and move.target in by_name:
            found += _of_move(request, mesh, by_name, runs, move, quantized)
    found += amax_collectives(request, mesh, quantized)
    return _merged(found, by_name)


def _of_weight(
    request: Request, mesh: Mesh, tensor: TensorPlan, runs: Sequence[Run], quantized: Sequence[QuantizedWeight]
) -> Iterable[PlannedCollective]:
    """The gathers of a weight for each use in each pass, the reduce-scatters of its gradient, and what is moved once a step."""
    layers = layers_on_device(request, mesh, tensor)
    times = layers * request.microbatches
    coded = next((one for one in quantized if one.name == tensor.name and one.copies), None)
    of_codes = 0 if coded is None else min(layers, coded.num)
    moves = moves_of(request, mesh, tensor)
    for component, use, plain, scatters in moves.uses:
        again = 0 if use.kept else layers_gathered_again(runs, tensor.stack, range(of_codes, layers))
        width = DTYPE_BYTES[use.gather_dtype]
        for gather in plain:
            rounds = (layers - of_codes) * request.microbatches
            if rounds:
                yield _planned(component, "forward", gather, width, rounds, tensor.name)
            if again:
                yield _planned(component, "recompute", gather, width, again * request.microbatches, tensor.name)
        if coded is not None:
            for phase, gather in _of_copies(request, mesh, coded, component, plain, DTYPE_BYTES[use.gather_dtype]):
                yield replace(gather, phase=phase, count_per_step=of_codes * request.microbatches)
        for scatter in scatters:
            yield _planned(component, "backward", scatter, DTYPE_BYTES[use.reduce_dtype], times, tensor.name)
    yield from _over_replicas(moves, tensor, layers)


def sum_over_replicas(request: Request, mesh: Mesh, tensor: TensorPlan, layers: int) -> Iterator[PlannedCollective]:
    """The reduction of a weight's gradient over its replicas by JAX, and the gather of what each device has updated, once a step."""
    yield from _over_replicas(moves_of(request, mesh, tensor), tensor, layers)


def _over_replicas(moves: WeightMoves, tensor: TensorPlan, layers: int) -> Iterator[PlannedCollective]:
    for reduce in moves.reduces:
        yield _planned(tensor.component, "update", reduce, DTYPE_BYTES[moves.update.dtype], layers, tensor.name)
    for gather in moves.gathers_updated:
        yield _planned(tensor.component, "update", gather, DTYPE_BYTES[tensor.dtype], layers, tensor.name)


def _of_copies(
    request: Request,
    mesh: Mesh,
    weight: QuantizedWeight,
    component: str,
    plain: Iterable[Collective],
    width: int,
) -> Iterator[tuple[Phase, PlannedCollective]]:
    """The gathers of each copy of a weight by JAX: an array each, of codes and of scales; ``plain``: of the weight itself."""
    for copy in weight.copies:
        found = [_planned(component, "forward", one, width, 0, weight.name) for one in plain if copy.quantizer is None]
        for array in copy.arrays:
            for one in movement(array.at_rest, array.gathered, (), array.shape, mesh):
                planned = _planned(component, "forward", one, array.element_bytes, 0, weight.name)
                found.append(replace(planned, dtype=array.dtype))
        for phase in copy_phases(request, weight, copy):
            for one in found:
                yield phase, one


def _of_groups(
    request: Request,
    mesh: Mesh,
    weights: Sequence[TensorPlan],
    runs: Sequence[Run],
    quantized: Sequence[QuantizedWeight],
) -> Iterator[PlannedCollective]:
    """The collectives of FSDP parameter groups (``core/plan/fsdp_groups.py``), layer by layer.

    | collective | when | of what |
    |---|---|---|
    | all-gather | each pass that needs it, each microbatch | the unsharded weights of a group, padded, in the gather dtype |
    | reduce-scatter | each microbatch | their unsharded gradients, padded, in the reduce dtype |
    | all-reduce over the replicas of all of a group | once a step | the result of the reduce-scatter |
    | all-reduce over other replicas | once a step | the gradient shards of all groups that have the same axes and dtype |
    """
    # In a user's own program all layers form one stack. Its submodules may have other numbers of layers.
    by_stack: dict[tuple[str | None, int], list[TensorPlan]] = {}
    for row in trained(request, weights):
        by_stack.setdefault((row.stack, row.num), []).append(row)
    by_replicas: dict[tuple[tuple[str, ...], str], list[tuple[WeightOfLayer, int]]] = {}
    for (stack, _), rows in by_stack.items():
        layers = layers_on_device(request, mesh, rows[0])
        for layer, num in _alike(request, quantized, runs, rows, layers):
            before = 0 if layer is None else request.table.weight(rows[0].name).first_in_stack
            again = layer is not None and gathers_again(runs, stack, layer - before)
            ones = [weight_of_layer(request, mesh, row, layer) for row in rows]
            for updated in update_groups(ones):
                for phase, one, dtype, times in updated.collectives(mesh, num, request.microbatches):
                    yield _planned_groups(updated.weights, mesh, phase, one, DTYPE_BYTES[dtype], times)
            for group in groups_of(ones):
                yield from _of_group(group, request, mesh, num, quantized, again=again and not group.kept)
                for one in group.weights:
                    if axes := group.other_replicas(one):
                        by_replicas.setdefault((axes, one.reduce_dtype), []).append((one, num))
    for (axes, dtype), ones in by_replicas.items():
        elements = sum(one.shard_elements(mesh) * layers for one, layers in ones)
        reduce = Collective(kind="all-reduce", axes=axes, elements_per_device=elements)
        reduced = [one for one, layers in ones for _ in range(layers)]
        yield _planned_groups(reduced, mesh, "update", reduce, DTYPE_BYTES[dtype], 1)


def _of_group(
    group: FsdpGroup,
    request: Request,
    mesh: Mesh,
    layers: int,
    quantized: Sequence[QuantizedWeight],
    *,
    again: bool,
) -> Iterator[PlannedCollective]:
    if not group.axes:
        return
    first, shard = group.weights[0], group.shard_elements(mesh)
    unsharded, times = shard * mesh.size(group.axes), layers * request.microbatches
    reduce_width, gather_width = DTYPE_BYTES[first.reduce_dtype], DTYPE_BYTES[first.gather_dtype]
    gather = Collective(kind="all-gather", axes=group.axes, elements_per_device=unsharded)
    if group.of_codes:
        yield from _of_codes(group, request, mesh, quantized, gather_width, times)
    else:
        for phase in ("forward", "recompute") if again else ("forward",):
            yield _planned_groups(group.weights, mesh, phase, gather, gather_width, times)
    scatter = Collective(kind="reduce-scatter", axes=group.axes, elements_per_device=unsharded)
    yield _planned_groups(group.weights, mesh, "backward", scatter, reduce_width, times)
    if group.replicas:
        reduce = Collective(kind="all-reduce", axes=group.replicas, elements_per_device=shard)
        yield _planned_groups(group.weights, mesh, "update", reduce, reduce_width, layers)


def _alike(
    request: Request,
    quantized: Sequence[QuantizedWeight],
    runs: Sequence[Run],
    rows: Sequence[TensorPlan],
    layers: int,
) -> Iterator[tuple[int | None, int]]:
    """Runs of layers whose weights are gathered alike, each by its first layer and its length: the last ones may stay high, and some
    may keep their weights gathered."""
    if rows[0].stack is None:
        yield None, layers
        return
    names = {row.name for row in rows}
    ends = {min(layers, one.num) for one in quantized if one.name in names and one.copies}
    for run, later in pairwise(one for one in runs if one.stack == rows[0].stack):
        if run.gathers_again != later.gathers_again:
            ends.add(min(layers, run.layers.stop))
    before, first = request.table.weight(rows[0].name).first_in_stack, 0
    for end in sorted({*ends, layers}):
        if end > first:
            yield before + first, end - first
        first = end


def _of_codes(
    group: FsdpGroup,
    request: Request,
    mesh: Mesh,
    quantized: Sequence[QuantizedWeight],
    width: int,
    times: int,
) -> Iterator[PlannedCollective]:
    """The gathers of a group of which codes and scales are sent: as bytes, all in one of each phase."""
    by_name = {one.name: one for one in quantized}
    found: dict[Phase, list[tuple[WeightOfLayer, int]]] = {}
    for one in group.weights:
        weight = by_name[one.weight]
        for copy in weight.copies:
            size = one.shard_elements(mesh) * mesh.size(group.axes) * width
            if copy.quantizer is not None:
                size = sum(array.gathered_bytes(mesh) for array in copy.arrays)
            for phase in copy_phases(request, weight, copy):
                found.setdefault(phase, []).append((one, size))
    for phase, sizes in found.items():
        gather = Collective(kind="all-gather", axes=group.axes, elements_per_device=sum(size for _, size in sizes))
        planned = _planned_groups([one for one, _ in sizes], mesh, phase, gather, 1, times)
        yield replace(planned, dtype="uint8")


def _planned_groups(
    weights: Sequence[WeightOfLayer], mesh: Mesh, phase: Phase, collective: Collective, width: int, times: int
) -> PlannedCollective:
    names = tuple(dict.fromkeys(one.weight for one in weights))
    return replace(_planned(component_of(weights, mesh), phase, collective, width, times, names[0]), tensors=names)


def _of_move(
    request: Request,
    mesh: Mesh,
    by_name: Mapping[str, TensorPlan],
    runs: Sequence[Run],
    move: Move,
    quantized: Sequence[QuantizedWeight],
) -> Iterable[PlannedCollective]:
    if move.kind in ("dispatch", "combine"):
        again = partial(moved_again, request.table, request.engine, runs)
        yield from collectives_of_experts(request, mesh, by_name, move, quantized, again=again)
        return
    source, target = by_name[move.source], by_name[move.target]
    forward, backward = _both_ways(move, source, target, request.layout, request.microbatches, request.length, mesh)
    if not forward and not backward:
        return
    moved = resharding(request, by_name, move)
    width = DTYPE_BYTES[source.dtype]
    shared = min(source, target, key=lambda row: row.num)
    times = layers_on_device(request, mesh, shared) * request.microbatches
    in_layer = not {source.component, target.component} & set(OUTSIDE_LAYERS) and not made_of_the_input(
        request.table, move.target
    )
    made = _made_beside(request, by_name, move, moved)
    again = ceil(times * moved_again(request.table, request.engine, runs, move)) if in_layer else 0
    for collective in () if made == "forward" else forward:
        rounds = times * _rounds(collective, mesh)
        yield _planned(moved.component, "forward", collective, width, rounds, move.target)
        if again:
            rounds = again * _rounds(collective, mesh)
            yield _planned(moved.component, "recompute", collective, width, rounds, move.target)
    # Integers have no gradient.
    for collective in backward if source.dtype in FLOATS and made != "backward" else ():
        rounds = times * _rounds(collective, mesh)
        yield _planned(moved.component, "backward", collective, width, rounds, move.source)


@lru_cache(maxsize=4096)
def _both_ways(
    move: Move, source: TensorPlan, target: TensorPlan, layout: Layout, microbatches: int, length: int, mesh: Mesh
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The collectives of a move of one layer and microbatch, and those of its cotangent."""
    moved = resharding_of_rows(move, source, target, layout, microbatches, length)
    ring = move.kind == "keys" and layout.move_attention == "ring"
    # A ring permutes in place of a gather, so the hops of a gather over an entire slice do not apply.
    hop_mesh = Mesh(mesh.axes) if ring else mesh
    forward = movement(moved.before, moved.after, moved.partial, moved.shape, hop_mesh)
    backward = movement(moved.after, moved.before, moved.cotangent_partial, moved.shape, hop_mesh)
    return (_as_ring(forward, mesh), _as_ring(backward, mesh)) if ring else (forward, backward)


def _made_beside(
    request: Request, by_name: Mapping[str, TensorPlan], move: Move, moved: Resharding
) -> Literal["forward", "backward"] | None:
    """The pass in which a move is that of another part of the layer: one array is resharded in one way, once where XLA compiles the
    step. The parts of a layer have one input, and their outputs one cotangent; the cotangents of inputs differ, as do outputs."""
    for one in request.table.moves if move.beside and request.properties.joins_equal_results else ():
        other = resharding(request, by_name, one) if move.beside in (one.target, one.source) else None
        if other is None or (other.before, other.after) != (moved.before, moved.after):
            continue
        if (one.source, one.target) == (move.source, move.beside) and other.partial == moved.partial:
            return "forward"
        if (one.target, one.source) == (
            move.target,
            move.beside,
        ) and other.cotangent_partial == moved.cotangent_partial:
            return "backward"
    return None


@lru_cache(maxsize=4096)
def made_of_the_input(table: ModelTable, name: str) -> bool:
    """Whether an activation depends on the input alone. It is then moved once a step, outside the layers."""
    row = next(row for row in table.activations if row.name == name)
    return row.component == "input" or any(m.target == name and made_of_the_input(table, m.source) for m in table.moves)


def _as_ring(collectives: tuple[Collective, ...], mesh: Mesh) -> tuple[Collective, ...]:
    """The gathers as rings: each permute sends one device's shard to the next (``_rounds``), and nothing is gathered."""
    return tuple(
        Collective(kind="permute", axes=c.axes, elements_per_device=c.elements_per_device // mesh.size(c.axes))
        for c in collectives
    )


def _rounds(collective: Collective, mesh: Mesh) -> int:
    """How often a shard is sent on until every device has received it; 1 for a collective that is no ring's."""
    return mesh.size(collective.axes) - 1 if collective.kind == "permute" else 1


def amax_collectives(request: Request, mesh: Mesh, quantized: Sequence[QuantizedWeight]) -> Iterator[PlannedCollective]:
    """The reductions of amaxes in a step."""
    for one in amax_reductions(request, mesh, quantized):
        reduce = Collective(kind="all-reduce", axes=one.axes, elements_per_device=one.values)
        planned = _planned(one.component, one.phase, reduce, AMAX_BYTES, one.times, one.weights[0])
        yield replace(planned, tensors=one.weights, dtype=AMAX_DTYPE)


def _planned(
    component: str, phase: Phase, collective: Collective, width: int, times: int, tensor: str
) -> PlannedCollective:
    return PlannedCollective(
        component=component,
        phase=phase,
        kind=collective.kind,
        axes=collective.axes,
        bytes_per_device=collective.elements_per_device * width,
        count_per_step=times,
        tensors=(tensor,),
        subgroup=collective.subgroup,
        beside=collective.beside,
        rearranged=collective.rearranged,
        compiled_as=collective.compiled_as,
    )


def _merged(
    collectives: Iterable[PlannedCollective], by_name: Mapping[str, TensorPlan]
) -> tuple[PlannedCollective, ...]:
    """Equal collectives as one row; those of integers are rows of their own."""
    rows: dict[tuple[object, ...], list[PlannedCollective]] = {}
    for one in collectives:
        of_floats = by_name[one.tensors[0]].dtype in FLOATS
        sent = (one.bytes_per_device, one.dtype, of_floats)
        key = (one.component, one.phase, one.kind, one.axes, one.ragged, one.subgroup, one.beside, *sent)
        rows.setdefault(key, []).append(one)
    return tuple(map(_joined, rows.values()))


def _joined(equal: Sequence[PlannedCollective]) -> PlannedCollective:
    if len(equal) == 1:
        return equal[0]
    names = dict.fromkeys(name for planned in equal for name in planned.tensors)
    return replace(equal[-1], count_per_step=sum(planned.count_per_step for planned in equal), tensors=tuple(names))
