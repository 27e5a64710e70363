"""The boxes of every weight that a device has at rest, as a checkpoint holds them: in the table's dims, layers stacked. So too of
what a run keeps for delayed amaxes, which is sharded in its own way; and of what the optimizer keeps for a weight whose update is
sharded.

In a pipeline a device has the boxes of its rank's stages, each of which is a model of its own whose layers keep their numbers. What is
outside the layers is at a stage's end on PyTorch; on JAX, and where all stages share an end, it is as the plan of the model says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import Owned, owned_boxes, saves, shard_box
from shardwright.core.boxes.stored import table_boxes
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Weight
from shardwright.core.plan.fsdp_groups import trained, weight_of_layer, weights_of_rows
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.stages.planned import Pipeline

UPDATE = "update/"
"""Before the name of a weight whose update is sharded in another way than the weight: the boxes of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBox:
    """One box of a tensor. ``weight``: its name; with ``UPDATE`` before it, a box of what the optimizer keeps for that weight. ``saves``:
    whether this device saves it; of its replicas the first one does."""

    weight: str
    box: Box
    saves: bool


def saved_boxes(plan: Plan, device: int) -> Iterator[SavedBox]:
    """The boxes that ``device`` has of every weight, on the engine of the plan: JAX without one; and of delayed amaxes.

    Of a tied weight that two stages have, the first of them saves it.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        yield from _saved(plan, device, _names(plan))
        return
    by_all = held_by_all(plan)
    yield from _saved(plan, device, by_all)
    rank, inner = place_in_stage(pipeline, plan.mesh, device)
    for stage in pipeline.of_rank(rank):
        own = plan.stage_plans[stage.number]
        before = {name for earlier in plan.stage_plans[: stage.number] for name in _ends_of(earlier)}
        for one in _saved(own, inner, _names(own) - by_all):
            yield SavedBox(weight=one.weight, box=one.box, saves=one.saves and one.weight not in before)


def owned_at_rest(plan: Plan) -> Iterator[tuple[str, Owned]]:
    """Every tensor with the boxes of each device: those of ``saved_boxes``, of all devices at once.

    Layers that are stacked one after the other are one box.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        yield from _owned(plan, _names(plan))
        return
    by_all = held_by_all(plan)
    yield from _owned(plan, by_all)
    places = [place_in_stage(pipeline, plan.mesh, device) for device in range(plan.mesh.num_devices)]
    of_stages = [dict(_owned(own, _names(own) - by_all)) for own in plan.stage_plans]
    for name in dict.fromkeys(name for owned in of_stages for name in owned):
        stages = [
            [of_stages[stage.number][name] for stage in pipeline.of_rank(rank) if name in of_stages[stage.number]]
            for rank in range(pipeline.choice.ranks)
        ]
        joined = _joined()
        yield name, tuple(joined([owned[inner] for owned in stages[rank]]) for rank, inner in places)


def held_by_all(plan: Plan) -> frozenset[str]:
    """The tensors of a pipeline that are on every device as the plan of the model says: of what is outside the layers, all on JAX, and
    on PyTorch the ends that all stages share."""
    outside = _ends_of(plan)
    return (
        outside
        if plan.request.properties.one_program
        else outside - {name for stage in plan.stage_plans for name in _ends_of(stage)}
    )


def place_in_stage(pipeline: Pipeline, mesh: Mesh, device: int) -> tuple[int, int]:
    """The rank of a device in the pipeline, and its number among the devices of that rank, which are those of a stage's mesh."""
    here = mesh.coordinates(device)
    along = Mesh(tuple(axis for axis in mesh.axes if axis.name in pipeline.axes))
    inside = Mesh(tuple(axis for axis in mesh.axes if axis.name not in pipeline.axes))
    return along.device(here), inside.device(here)


def _names(plan: Plan) -> frozenset[str]:
    return frozenset((*(row.name for row in plan.weights), *(one.name for one in plan.delayed_tensors)))


def _ends_of(plan: Plan) -> frozenset[str]:
    """The tensors outside the layers."""
    outside = {row.name for row in plan.weights if row.stack is None}
    return frozenset((*outside, *(one.name for one in plan.delayed_tensors if one.weight in outside)))


def _joined() -> Callable[[Sequence[tuple[Box, ...]]], tuple[Box, ...]]:
    """Joins the boxes of a rank's stages. Devices with the same boxes share one tuple: it is made once."""
    known: dict[tuple[tuple[Box, ...], ...], tuple[Box, ...]] = {}

    def join(boxes: Sequence[tuple[Box, ...]]) -> tuple[Box, ...]:
        return known.setdefault(tuple(boxes), tuple(box for own in boxes for box in own))

    return join


def _saved(plan: Plan, device: int, names: Collection[str]) -> Iterator[SavedBox]:
    rows = [row for row in plan.weights if row.name in names]
    yield from (_of_stacks if plan.request.properties.stacks_layers else _of_layers)(plan, rows, device)
    table = plan.request.table
    for one in plan.delayed_tensors:
        if one.name in names and (box := shard_box(one.spec, plan.mesh, one.shape, device)) is not None:
            saved = in_stack(box, table.weight(one.weight))
            yield SavedBox(weight=one.name, box=saved, saves=saves(one.spec, plan.mesh, device))


def _owned(plan: Plan, names: Collection[str]) -> Iterator[tuple[str, Owned]]:
    table = plan.request.table
    for one in plan.delayed_tensors:
        if one.name in names:
            yield one.name, _all_in_stack(owned_boxes(one.spec, plan.mesh, one.shape), table.weight(one.weight))
    rows = [row for row in plan.weights if row.name in names]
    if not plan.request.properties.stacks_layers:
        yield from _owned_of_layers(plan, rows)
        return
    for row in rows:
        whole = Box.whole(row.stacked_saved_shape)
        for name, spec in _specs_of_stack(row):
            owned = owned_boxes(spec, plan.mesh, row.stacked_shape)
            # Most weights have no padding, and there are as many boxes as devices.
            padded = row.stacked_saved_shape != row.stacked_shape
            owned = tuple(_common(boxes, whole) for boxes in owned) if padded else owned
            yield name, _all_in_stack(owned, table.weight(row.name))


def _owned_of_layers(plan: Plan, rows: Sequence[TensorPlan]) -> Iterator[tuple[str, Owned]]:
    request, devices = plan.request, range(plan.mesh.num_devices)
    table = request.table
    for row in trained(request, rows):
        # The layers of a weight have the same boxes.
        weight = table.weight(row.name)
        first = weight.first_in_stack
        outer = Box((), ()) if row.stack is None else Box((first,), (first + row.num,))
        one = weight_of_layer(request, plan.mesh, row, None if row.stack is None else first)
        known: dict[Box | None, tuple[Box, ...]] = {None: ()}
        for in_update in (False, True) if one.update_splits else (False,):
            owned: list[tuple[Box, ...]] = []
            for device in devices:
                box = one.saved_box(plan.mesh, device, in_update=in_update)
                if box is not None and box not in known:
                    inner = [stored.box for stored in table_boxes(weight, box)]
                    known[box] = tuple(Box((*outer.start, *of.start), (*outer.stop, *of.stop)) for of in inner)
                owned.append(known[box])
            yield (UPDATE if in_update else "") + row.name, tuple(owned)
    for row in rows:
        weight = table.weight(row.name)
        if weight.frozen:
            yield row.name, ((in_stack(Box.whole(_stacked(weight)), weight),),) * len(devices)


def _common(boxes: Sequence[Box], whole: Box) -> tuple[Box, ...]:
    """Without padding, which is in no box."""
    return tuple(common for box in boxes if (common := box.intersect(whole)) is not None)


def _of_stacks(plan: Plan, rows: Sequence[TensorPlan], device: int) -> Iterator[SavedBox]:
    for row in rows:
        for name, spec in _specs_of_stack(row):
            box = shard_box(spec, plan.mesh, row.stacked_shape, device)
            # Padding is in no box.
            box = box and box.intersect(Box.whole(row.stacked_saved_shape))
            if box is not None:
                box = in_stack(box, plan.request.table.weight(row.name))
                yield SavedBox(weight=name, box=box, saves=saves(spec, plan.mesh, device))


def _specs_of_stack(row: TensorPlan) -> Iterator[tuple[str, Spec]]:
    yield row.name, row.stacked_at_rest
    if row.update_is_sharded:
        yield UPDATE + row.name, row.stacked_updated


def _of_layers(plan: Plan, rows: Sequence[TensorPlan], device: int) -> Iterator[SavedBox]:
    table = plan.request.table
    for one in weights_of_rows(plan, rows):
        for in_update in (False, True) if one.update_splits else (False,):
            box = one.saved_box(plan.mesh, device, in_update=in_update)
            for stored in () if box is None else table_boxes(table.weight(one.weight), box):
                found = stored.box
                if one.layer is not None:
                    found = Box((one.layer, *found.start), (one.layer + 1, *found.stop))
                name, spec = (UPDATE + one.weight, one.in_update) if in_update else (one.weight, one.at_rest)
                yield SavedBox(weight=name, box=found, saves=saves(spec, plan.mesh, device))
    for row in rows:
        weight = table.weight(row.name)
        if weight.frozen:
            assert row.at_rest is not None
            box = in_stack(Box.whole(_stacked(weight)), weight)
            yield SavedBox(weight=row.name, box=box, saves=saves(row.at_rest, plan.mesh, device))


def _stacked(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight in the table's dims, its layers stacked."""
    return weight.shape if weight.stack is None else (weight.num, *weight.shape)


def in_stack(box: Box, weight: Weight) -> Box:
    """A box of the layers that a stage has of a stack, among all its layers."""
    first = weight.first_in_stack
    if not first:
        return box
    return Box((box.start[0] + first, *box.start[1:]), (box.stop[0] + first, *box.stop[1:]))


def _all_in_stack(owned: Owned, weight: Weight) -> Owned:
    """The same of every device. Those that share boxes still do."""
    if not weight.first_in_stack:
        return owned
    moved: Mapping[tuple[Box, ...], tuple[Box, ...]] = {
        boxes: tuple(in_stack(box, weight) for box in boxes) for boxes in set(owned)
    }
    return tuple(moved[boxes] for boxes in owned)
