"""The order of several axes on one dim: persistent axes, then gathered axes; mesh order inside each group.

With this order, a gather or a change of component moves data only inside the groups of the gathered axes.

| tensor | persistent axes | gathered axes |
|---|---|---|
| weight | those that still shard the dim in use | those over which it is gathered |
| activation | those that shard the dim in every component | those that shard it in some components only |
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh


def ordered(mesh: Mesh, persistent: Iterable[str], gathered: Iterable[str]) -> tuple[str, ...]:
    """The axes of one dim, major first.

    >>> ordered(Mesh.of(fsdp=2, tensor=4), persistent=["tensor"], gathered=["fsdp"])
    ('tensor', 'fsdp')
    """
    return (*mesh.in_mesh_order(persistent), *mesh.in_mesh_order(gathered))


def persistent_axes(layout: Layout, logical_axis: str, components: Iterable[str]) -> frozenset[str]:
    """The axes that shard a logical axis of activations in each of the components."""
    # Queries are sharded as the length of their row is.
    name = "length" if logical_axis == "q_length" else logical_axis
    present = list(components)
    return frozenset(axis for axis in layout.entries if all(name in layout.dims_sharded_by(axis, c) for c in present))
