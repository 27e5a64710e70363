"""The update of a weight: how its gradient, and what the optimizer keeps for it, are sharded over replicas of the weight.

An axis that replicates a weight, and over which its gradient is partial, shards its update if the axis' entry says so.

| options of the entry | the gradient is reduced | summed over microbatches as | the optimizer's tensors |
|---|---|---|---|
| none | by all-reduce, once a step | the weight at rest | as the weight at rest |
| ``optimizer: shard`` | by reduce-scatter, once a step | the weight at rest | sharded over the axis too |
| ``gradients: shard`` in addition | by reduce-scatter, each microbatch | sharded over the axis too | sharded over the axis too |

After the update an all-gather makes the weight as it is at rest.

The dim is the first of these that is divisible by the axes on it and all axes that shard the update. On it, they come last: those
that shard the gradient, then the others, each in mesh order.

| property of the engine | dims that are tried |
|---|---|
| otherwise | the weight's storage list; if none is divisible, or there is no list, the update is sharded as the weight is |
| ``updates_any_dim`` | the dims as its module stores them |
| ``uneven_shards`` | if none is divisible, the shards of the first are uneven |
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import DimSpec, Spec
from shardwright.core.model.table import Weight
from shardwright.core.resolution.gradients import all_partial_axes


def shards_updates(layout: Layout) -> bool:
    """Whether an axis of the layout shards updates."""
    return any(entry.optimizer is not None for entry in layout.entries.values())


def update_axes(weight: Weight, layout: Layout, at_rest: Spec, in_use: Spec) -> tuple[str, ...]:
    """The axes that are to shard the update of a weight and do not shard the weight: those of its gradient, then the others."""
    partial = () if weight.frozen else all_partial_axes(weight, layout, in_use)
    wanted = [axis for axis in partial if layout.entries[axis].optimizer and axis not in at_rest.axes]
    return (
        *(axis for axis in wanted if layout.entries[axis].gradients),
        *(axis for axis in wanted if not layout.entries[axis].gradients),
    )


def resolve_update(
    weight: Weight, layout: Layout, mesh: Mesh, engine: Engine, at_rest: Spec, in_use: Spec, shape: Sequence[int]
) -> Spec | None:
    """The spec of the update of a weight; None where no axis of the layout shards updates. ``shape``: of one layer, in memory."""
    if not shards_updates(layout):
        return None
    axes = mesh.larger_than_one(update_axes(weight, layout, at_rest, in_use))
    sizes = dict(zip(weight.logical_axes, shape, strict=True))
    properties = ENGINES[engine]
    tried = weight.logical_axes if properties.updates_any_dim else weight.storage
    number = mesh.size(axes)
    name = next((n for n in tried if sizes[n] % (number * mesh.size(at_rest.axes_of(n))) == 0), None)
    if name is None and properties.uneven_shards:
        name = next(iter(tried), None)
    if name is None or not axes:
        return at_rest
    return Spec(
        tuple(DimSpec(d.logical_axis, (*d.axes, *axes) if d.logical_axis == name else d.axes) for d in at_rest.dims)
    )


def held_gradient(layout: Layout, at_rest: Spec, in_update: Spec) -> Spec:
    """The spec of a gradient while it is summed over microbatches."""
    late = [axis for axis in in_update.axes if axis not in at_rest.axes and not layout.entries[axis].gradients]
    return in_update.without(late)
