"""The collectives that one training step needs, predicted from the specs and the table's moves alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from shardwright.core.gradients import partial_axes
from shardwright.core.mesh import Mesh
from shardwright.core.movement import Collective, elements_per_device, movement
from shardwright.core.plan import Phase, PlannedCollective, TensorPlan
from shardwright.core.request import FLOATS, Request
from shardwright.core.roles import OUTSIDE_LAYERS
from shardwright.core.spec import Spec
from shardwright.core.table import DTYPE_BYTES, ModelTable, Move


def step_collectives(
    request: Request, mesh: Mesh, sizes: Mapping[str, int], tensors: Sequence[TensorPlan]
) -> tuple[PlannedCollective, ...]:
    """Every collective of a step, equal ones counted together, in the order of component, phase and axes."""
    by_name = {tensor.name: tensor for tensor in tensors}
    found: list[PlannedCollective] = []
    for tensor in tensors:
        if tensor.kind == "weight":
            found += _of_weight(request, mesh, tensor)
    for move in request.table.moves:
        if move.source in by_name and move.target in by_name:
            found += _of_move(request, mesh, sizes, by_name, move)
    return _merged(found)


def _of_weight(request: Request, mesh: Mesh, tensor: TensorPlan) -> Iterable[PlannedCollective]:
    """Gathered for use in each pass that needs it; its gradient reduced; replicas once per step."""
    assert tensor.at_rest is not None
    shape = dict(zip(tensor.in_use.logical_axes[-len(tensor.shape) :], tensor.shape, strict=True))
    shape.setdefault("layers", tensor.num)
    strip = slice(len(tensor.in_use.dims) - len(tensor.shape), None)
    at_rest, in_use = Spec(tensor.at_rest.dims[strip]), Spec(tensor.in_use.dims[strip])
    width = DTYPE_BYTES[request.dtype]
    layers = _layers_on_device(request, mesh, tensor)
    times = layers * request.micro_steps
    again = tensor.stack is not None and request.remat != "none"
    for gather in movement(at_rest, in_use, (), shape, mesh):
        yield _planned(tensor.component, "forward", gather, width, times, tensor.name)
        if again:
            yield _planned(tensor.component, "recompute", gather, width, times, tensor.name)
    scattered = mesh.larger_than_one(a for a, kind in tensor.gradient.items() if kind == "reduce-scatter")
    summed = mesh.larger_than_one(a for a, kind in tensor.gradient.items() if kind == "all-reduce")
    if scattered:
        whole = elements_per_device(at_rest.without(scattered), shape, mesh)
        scatter = Collective(kind="reduce-scatter", axes=scattered, elements_per_device=whole)
        yield _planned(tensor.component, "backward", scatter, DTYPE_BYTES[request.weights_dtype], times, tensor.name)
    if summed:
        part = elements_per_device(at_rest, shape, mesh)
        reduce = Collective(kind="all-reduce", axes=summed, elements_per_device=part)
        yield _planned(tensor.component, "update", reduce, DTYPE_BYTES[request.weights_dtype], layers, tensor.name)


def _of_move(
    request: Request, mesh: Mesh, sizes: Mapping[str, int], by_name: Mapping[str, TensorPlan], move: Move
) -> Iterable[PlannedCollective]:
    source, target = by_name[move.source], by_name[move.target]
    layout = request.layout
    shape = dict(zip(source.in_use.renamed(move.renamed or {}).logical_axes, source.shape, strict=True))
    shape["batch"] = sizes["batch"] // request.micro_steps
    before = source.in_use.renamed(move.renamed or {})
    # The two tables' rows may order the dims of one tensor differently; the movement asks by name.
    after = Spec.build(before.logical_axes, {dim.logical_axis: dim.axes for dim in target.in_use.dims})
    forward = movement(before, after, partial_axes(layout, move.summed), shape, mesh)
    backward = movement(after, before, partial_axes(layout, move.feeds), shape, mesh)
    if move.kind == "keys" and layout.move_attention == "ring":
        forward, backward = _as_ring(forward, mesh), _as_ring(backward, mesh)
    if move.kind in ("dispatch", "combine") and layout.move_moe == "ring":
        around = _ring_of_experts(request, mesh, by_name)
        there, back = around if move.kind == "dispatch" else around[::-1]
        forward, backward = _without_all_to_all(forward) + there, _without_all_to_all(backward) + back
    width = DTYPE_BYTES[source.dtype]
    shared = min(source, target, key=lambda row: row.num)
    times = _layers_on_device(request, mesh, shared) * request.micro_steps
    component = target.component if move.kind in ("dispatch", "keys") else source.component
    component = "moe" if move.kind == "combine" else component
    in_layer = not {source.component, target.component} & set(OUTSIDE_LAYERS) and not _once(request.table, move.target)
    for collective in forward:
        yield _planned(component, "forward", collective, width, times, move.target)
        if (
            in_layer
            and not move.ends_layer
            and (request.remat == "full" or (request.remat == "dots" and move.kind in ("queries", "keys")))
        ):
            yield _planned(component, "recompute", collective, width, times, move.target)
    # Integers have no gradient.
    for collective in backward if source.dtype in FLOATS else ():
        yield _planned(component, "backward", collective, width, times, move.source)


def _once(table: ModelTable, name: str) -> bool:
    """Whether an activation is what the input gives and nothing else: it is moved once a step, and in no layer."""
    row = next(row for row in table.activations if row.name == name)
    return row.component == "input" or any(m.target == name and _once(table, m.source) for m in table.moves)


def _as_ring(collectives: tuple[Collective, ...], mesh: Mesh) -> tuple[Collective, ...]:
    """A ring passes each device's part on, one permute after another, where a gather holds the whole."""
    return tuple(
        Collective(kind="permute", axes=c.axes, elements_per_device=c.elements_per_device // mesh.size(c.axes))
        for c in collectives
        for _ in range(mesh.size(c.axes) - 1)
    )


def _ring_of_experts(
    request: Request, mesh: Mesh, by_name: Mapping[str, TensorPlan]
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """There and back: every token is gathered over the expert axes, each device adds what its experts make of it, and
    the sums are scattered. Whatever the number of experts a token chooses, it travels once."""
    axes = mesh.larger_than_one(request.layout.axes_with("expert", "moe"))
    if not axes:
        return (), ()
    tokens = by_name["router.grouped"]
    shape = dict(zip(tokens.in_use.logical_axes, tokens.shape, strict=True))
    shape["batch"] //= request.micro_steps
    size = elements_per_device(tokens.in_use.without(axes), shape, mesh)
    gather = (Collective(kind="all-gather", axes=axes, elements_per_device=size),)
    scatter = (Collective(kind="reduce-scatter", axes=axes, elements_per_device=size),)
    return gather, scatter


def _without_all_to_all(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    return tuple(collective for collective in collectives if collective.kind != "all-to-all")


def _layers_on_device(request: Request, mesh: Mesh, tensor: TensorPlan) -> int:
    """How many of the layers that share a row one device computes: all, unless pipeline stages share them out."""
    stages = mesh.size(request.layout.axes_with("stage", tensor.component)) if tensor.num > 1 else 1
    return ceil(tensor.num / stages)


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
    )


def _merged(collectives: Iterable[PlannedCollective]) -> tuple[PlannedCollective, ...]:
    """Equal collectives as one row."""
    rows: dict[tuple[object, ...], PlannedCollective] = {}
    for one in collectives:
        key = (one.component, one.phase, one.kind, one.axes, one.bytes_per_device)
        seen = rows.get(key)
        rows[key] = PlannedCollective(
            component=one.component,
            phase=one.phase,
            kind=one.kind,
            axes=one.axes,
            bytes_per_device=one.bytes_per_device,
            count_per_step=one.count_per_step + (seen.count_per_step if seen else 0),
            tensors=(*(seen.tensors if seen else ()), *one.tensors),
        )
    return tuple(rows.values())
