"""The order of several axes on one dim: those that stay, then those that leave; mesh order inside each group.

Then neither a gather nor a change of component moves data outside the group of the axes that leave.

| tensor | axes that stay | axes that leave |
|---|---|---|
| weight | those that still cut the dim in use | those it is gathered over |
| activation | those that cut the dim in every component | those that cut it in some components only |
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
    """The axes that cut a logical axis of activations in each of the components."""
    # A row's queries carry the cut of its length: both are one question.
    name = "length" if logical_axis == "q_length" else logical_axis
    present = list(components)
    return frozenset(axis for axis in layout.entries if all(name in layout.dims_sharded_by(axis, c) for c in present))
