"""The boxes of every weight that a device has at rest, as a checkpoint holds them: in the table's dims, layers stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import saves, shard_box
from shardwright.core.boxes.stored import table_boxes
from shardwright.core.plan.fsdp_groups import weights_of
from shardwright.core.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBox:
    """One box of a weight. ``saves``: whether this device saves it; of its replicas the first one does."""

    weight: str
    box: Box
    saves: bool


def saved_boxes(plan: Plan, device: int) -> Iterator[SavedBox]:
    """The boxes that ``device`` has of every weight, on the engine of the plan: JAX without one."""
    return _on_torch(plan, device) if plan.request.engine == "torch" else _on_jax(plan, device)


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
            shape = weight.shape if weight.stack is None else (weight.num, *weight.shape)
            yield SavedBox(weight=row.name, box=Box.whole(shape), saves=saves(row.at_rest, plan.mesh, device))
