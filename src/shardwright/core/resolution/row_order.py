"""The order of a row's tokens over the devices that share it: head and tail together, where that was asked for.

A query sees the keys before it, so that the last piece of a row is the most work. Cut into twice as many pieces as
there are devices, the first and the last one go to the first device, the second and the one before the last to the
second device, and so on: each then has equal work (Megatron-LM and Llama 3, arXiv:2407.21783, section 3.3.2, do so).

The loader arranges the rows, and nothing puts them back: positions and segments, which every mask is made of, are
arranged with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh

IN_ORDER = (0,)
"""A row that lies as it is written."""


def head_and_tail(devices: int) -> tuple[int, ...]:
    """For each of the ``2 * devices`` equal pieces of a row, as it lies, its number in the text.

    >>> head_and_tail(4)
    (0, 7, 1, 6, 2, 5, 3, 4)
    >>> head_and_tail(1)
    (0,)
    """
    if devices == 1:
        return IN_ORDER
    return tuple(piece for first in range(devices) for piece in (first, 2 * devices - 1 - first))


def in_order(layout: Layout, mesh: Mesh, *, load_balanced: bool) -> bool:
    """Whether rows lie as they are written: ``row_chunks`` is ``IN_ORDER``, found without naming a piece of each device."""
    whole = mesh.size(layout.axes_sharding("length", "input")) == 1
    return whole or not load_balanced or layout.move_attention == "ulysses"


def row_chunks(layout: Layout, mesh: Mesh, *, load_balanced: bool) -> tuple[int, ...]:
    """The order of a row's pieces under a layout; ``IN_ORDER`` where no axis cuts rows, or each device sees whole ones.

    Under ``ulysses`` a device attends with whole rows, and some of the heads: that is equal work already.
    """
    if in_order(layout, mesh, load_balanced=load_balanced):
        return IN_ORDER
    return head_and_tail(mesh.size(layout.axes_sharding("length", "input")))


def tiles(pieces: Sequence[int], groups: int) -> tuple[int, ...]:
    """The places in the text of equal pieces so small that each belongs to one of ``groups`` devices that share a row.

    >>> tiles((0, 3, 1, 2), groups=8), tiles((0,), groups=2), tiles((0, 3, 1, 2), groups=1)
    ((0, 1, 6, 7, 2, 3, 4, 5), (0, 1), (0, 3, 1, 2))
    """
    parts = lcm(len(pieces), groups) // len(pieces)
    return tuple(piece * parts + part for piece in pieces for part in range(parts))
