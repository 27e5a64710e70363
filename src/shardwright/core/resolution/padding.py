"""Padding of a vocabulary: its axes in use need not divide it.

| | size of the vocabulary |
|---|---|
| in memory, on both engines | the next multiple of the devices that share it |
| in a checkpoint | that of the model |

The padding is rows of zeros. No token has their number, and their logits are masked, so their gradients are zero and they stay
zero. The axes at rest count too on an engine that has equal shards only.
"""

from __future__ import annotations

from math import lcm

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import Owner, Weight
from shardwright.core.resolution.resolve import operand_spec, resolve_weight

PADDED_AXIS = "vocab"
"""The only logical axis that is padded: elsewhere a padded unit would take part in products and norms."""


def padded_shape(weight: Weight, owner: Owner, layout: Layout, mesh: Mesh, engine: Engine) -> tuple[int, ...]:
    """The shape of one layer of a weight in memory, in the dims of ``weight``. A user's own program has weights of its own
    shapes, which are never padded."""
    if PADDED_AXIS not in weight.logical_axes or owner != "ours":
        return weight.shape
    shards = []
    for component in (weight.component, *weight.uses):
        resolved = resolve_weight(weight, layout, mesh, engine, component)
        shards.append(mesh.size(operand_spec(resolved.in_use, component, layout, mesh).axes_of(PADDED_AXIS)))
        if not ENGINES[engine].uneven_shards and component == weight.component:
            shards.append(mesh.size(resolved.at_rest.axes_of(PADDED_AXIS)))
    return tuple(
        padded_size(size, lcm(*shards)) if name == PADDED_AXIS else size
        for name, size in zip(weight.logical_axes, weight.shape, strict=True)
    )


def padded_size(size: int, shards: int) -> int:
    """The smallest size, at least ``size``, that ``shards`` divides.

    >>> padded_size(50257, 4), padded_size(50257, 1)
    (50260, 50257)
    """
    return -(-size // shards) * shards
