"""The order of a row's tokens over the devices that share it: as in the text, or head and tail with load balancing.

A query attends to the keys before it, so the last chunk of a row is the most work. With load balancing a row is split into
twice as many chunks as devices. The first device has the first and the last chunk, the second device the second chunk and
the one before the last, and so on. All devices then have equal work, as in Megatron-LM and Llama 3 (arXiv:2407.21783,
section 3.3.2).

The loader orders the rows, and nothing restores the order: positions and segments, from which every mask is made, are
ordered as the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh

IN_ORDER = (0,)
"""The chunks of a row in the order of the text."""


def head_and_tail(devices: int) -> tuple[int, ...]:
    """For each of the ``2 * devices`` equal chunks of a row in the arrays, its number in the text.

    >>> head_and_tail(4)
    (0, 7, 1, 6, 2, 5, 3, 4)
    >>> head_and_tail(1)
    (0,)
    """
    if devices == 1:
        return IN_ORDER
    return tuple(chunk for first in range(devices) for chunk in (first, 2 * devices - 1 - first))


def in_order(layout: Layout, mesh: Mesh, *, load_balanced: bool) -> bool:
    """Whether rows are in the order of the text: ``row_chunks`` is ``IN_ORDER``, decided without listing the chunks."""
    unsharded = mesh.size(layout.axes_sharding("length", "input")) == 1
    return unsharded or not load_balanced or layout.move_attention == "ulysses"


def row_chunks(layout: Layout, mesh: Mesh, *, load_balanced: bool) -> tuple[int, ...]:
    """The order of a row's chunks under a layout; ``IN_ORDER`` where no axis shards the length, and under ``ulysses``.

    Under ``ulysses`` a device attends to entire rows with some of the heads, so all devices have equal work already.
    """
    if in_order(layout, mesh, load_balanced=load_balanced):
        return IN_ORDER
    return head_and_tail(mesh.size(layout.axes_sharding("length", "input")))


def tiles(chunks: Sequence[int], groups: int) -> tuple[int, ...]:
    """The places in the text of equal tiles, so small that each is on one of the ``groups`` devices that share a row.

    >>> tiles((0, 3, 1, 2), groups=8), tiles((0,), groups=2), tiles((0, 3, 1, 2), groups=1)
    ((0, 1, 6, 7, 2, 3, 4, 5), (0, 1), (0, 3, 1, 2))
    """
    tiles_per_chunk = lcm(len(chunks), groups) // len(chunks)
    return tuple(chunk * tiles_per_chunk + tile for chunk in chunks for tile in range(tiles_per_chunk))
