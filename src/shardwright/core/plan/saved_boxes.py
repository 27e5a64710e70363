"""The boxes of every weight that a device has at rest, as a checkpoint holds them: in the table's dims, layers stacked. So too of
what a run keeps for delayed amaxes, which is sharded in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import Owned, owned_boxes, saves, shard_box
from shardwright.core.boxes.stored import table_boxes
from shardwright.core.model.table import Weight
from shardwright.core.plan.fsdp_groups import trained, weight_of_layer, weights_of
from shardwright.core.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBox:
    """One box of a tensor. ``saves``: whether this device saves it; of its replicas the first one does."""

    weight: str
    box: Box
    saves: bool


def saved_boxes(plan: Plan, device: int) -> Iterator[SavedBox]:
    """The boxes that ``device`` has of every weight, on the engine of the plan: JAX without one; and of delayed amaxes."""
    yield from _on_torch(plan, device) if plan.request.engine == "torch" else _on_jax(plan, device)
    for one in plan.delayed_tensors:
        box = shard_box(one.spec, plan.mesh, one.shape, device)
        if box is not None:
            yield SavedBox(weight=one.name, box=box, saves=saves(one.spec, plan.mesh, device))


def owned_at_rest(plan: Plan) -> Iterator[tuple[str, Owned]]:
    """Every tensor with the boxes of each device: those of ``saved_boxes``, of all devices at once.

    Layers that are stacked one after the other are one box.
    """
    for one in plan.delayed_tensors:
        yield one.name, owned_boxes(one.spec, plan.mesh, one.shape)
    if plan.request.engine == "torch":
        yield from _owned_on_torch(plan)
        return
    for row in plan.weights:
        whole = Box.whole(row.stacked_saved_shape)
        owned = owned_boxes(row.stacked_at_rest, plan.mesh, row.stacked_shape)
        # Most weights have no padding, and there are as many boxes as devices.
        padded = row.stacked_saved_shape != row.stacked_shape
        yield row.name, tuple(_common(boxes, whole) for boxes in owned) if padded else owned


def _owned_on_torch(plan: Plan) -> Iterator[tuple[str, Owned]]:
    request, devices = plan.request, range(plan.mesh.num_devices)
    table = request.table
    for row in trained(request, plan.weights):
        # The layers of a weight have the same boxes.
        outer = Box((), ()) if row.stack is None else Box((0,), (row.num,))
        one = weight_of_layer(request, plan.mesh, row, None if row.stack is None else 0)
        known: dict[Box | None, tuple[Box, ...]] = {None: ()}
        owned: list[tuple[Box, ...]] = []
        for device in devices:
            box = one.saved_box(plan.mesh, device)
            if box is not None and box not in known:
                inner = [stored.box for stored in table_boxes(table.weight(row.name), box)]
                known[box] = tuple(Box((*outer.start, *of.start), (*outer.stop, *of.stop)) for of in inner)
            owned.append(known[box])
        yield row.name, tuple(owned)
    for weight in table.weights:
        if weight.frozen:
            yield weight.name, ((Box.whole(_stacked(weight)),),) * len(devices)


def _common(boxes: Sequence[Box], whole: Box) -> tuple[Box, ...]:
    """Without padding, which is in no box."""
    return tuple(common for box in boxes if (common := box.intersect(whole)) is not None)


def _on_jax(plan: Plan, device: int) -> Iterator[SavedBox]:
    for row in plan.weights:
        spec = row.stacked_at_rest
        box = shard_box(spec, plan.mesh, row.stacked_shape, device)
        # Padding is in no box.
        box = box and box.intersect(Box.whole(row.stacked_saved_shape))
        if box is not None:
            yield SavedBox(weight=row.name, box=box, saves=saves(spec, plan.mesh, device))


def _on_torch(plan: Plan, device: int) -> Iterator[SavedBox]:
    table = plan.request.table
    for one in weights_of(plan):
        box = one.saved_box(plan.mesh, device)
        for stored in () if box is None else table_boxes(table.weight(one.weight), box):
            found = stored.box
            if one.layer is not None:
                found = Box((one.layer, *found.start), (one.layer + 1, *found.stop))
            yield SavedBox(weight=one.weight, box=found, saves=saves(one.at_rest, plan.mesh, device))
    for row in plan.weights:
        weight = table.weight(row.name)
        if weight.frozen:
            assert row.at_rest is not None
            yield SavedBox(
                weight=row.name, box=Box.whole(_stacked(weight)), saves=saves(row.at_rest, plan.mesh, device)
            )


def _stacked(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight in the table's dims, its layers stacked."""
    return weight.shape if weight.stack is None else (weight.num, *weight.shape)
