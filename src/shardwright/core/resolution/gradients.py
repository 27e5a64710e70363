"""How each weight's gradient is reduced over each axis: derived from what is contracted, never configured.

| the gradient is partial over the axis | the axis shards | reduction |
|---|---|---|
| yes | the weight at rest | reduce-scatter |
| yes | the weight's update alone (``update.py``) | reduce-scatter, over replicas once per step, or in each microbatch with ``gradients: shard`` |
| yes | neither | all-reduce, over replicas once per step |
| no | either | none |

A gradient is partial over an axis that shards a dim contracted in computing it. It is also partial where the computation
shards a dim of the weight that is replicated in use: each device then computes the gradient of its own slice, and zeros
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import Contraction, Weight

Reduction = Literal["reduce-scatter", "all-reduce"]


def partial_axes(layout: Layout, contracted: tuple[Contraction, ...]) -> tuple[str, ...]:
    """The axes, in mesh order, over which a tensor is partial after a contraction of the given dims."""
    return tuple(
        axis
        for axis in layout.entries
        if any(name in layout.dims_sharded_by(axis, component) for component, name in contracted)
    )


@lru_cache(maxsize=4096)
def gradient_reductions(weight: Weight, layout: Layout, in_update: Spec, in_use: Spec) -> Mapping[str, Reduction]:
    """The reduction of a weight's gradient over each axis that needs one; none for a frozen weight.

    ``in_update``: the spec of its update, which is that at rest where no other axis shards the update.
    """
    if weight.frozen:
        return {}
    return {
        axis: "reduce-scatter" if axis in in_update.axes else "all-reduce"
        for axis in all_partial_axes(weight, layout, in_use)
    }


def all_partial_axes(weight: Weight, layout: Layout, in_use: Spec) -> tuple[str, ...]:
    """The axes, in mesh order, over which the gradient of a weight is partial, from any of its uses."""
    partial = {
        axis for component in (None, *weight.uses) for axis in partial_gradient_axes(weight, layout, in_use, component)
    }
    return tuple(axis for axis in layout.entries if axis in partial)


def partial_gradient_axes(
    weight: Weight, layout: Layout, in_use: Spec, component: str | None = None
) -> tuple[str, ...]:
    """The axes, in mesh order, over which the gradient from one use of a weight is partial.

    ``component``: that of a tied weight's second use; None: the weight's own. In addition to the axes of contracted dims
    these are the axes over which each device uses a slice of a replicated weight. A rule that leaves ``tensor`` out of the
    KV heads makes such a weight. A tied weight of which only one use is sharded is another.
    """
    own = component or weight.component
    contracted = tuple(c for c in weight.contracted if c[0] == own) if weight.uses else weight.contracted
    summed = set(partial_axes(layout, contracted))
    for axis in layout.entries:
        if axis not in in_use.axes and set(layout.dims_sharded_by(axis, own)) & set(weight.logical_axes):
            summed.add(axis)
    return tuple(axis for axis in layout.entries if axis in summed)
