"""How the mathematics and the layout meet: what crosses ranks is asked of ``Links``, and there is none on one device.

A step runs on each rank over its own parts of all arrays. ``move`` carries a named activation of the table from its
owner's layout to the next one's, ``use`` brings a weight into the form in which it is multiplied, and the rest says over
which ranks an algorithm of its own (a ring, experts, a cut vocabulary) works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_torch.io.mesh import Peers

Params = Mapping[str, torch.Tensor]
Move = Callable[[str, str, torch.Tensor], torch.Tensor]
"""``move(source, target, array)``: the activation ``source`` as ``target`` needs it; the table has a Move between them."""

HowMany = Callable[[torch.Tensor, int], list[int]]
"""``how_many(counts, total)``: counts of rows as numbers, which the device is asked for. ``total``: what they come to, if
nothing is dropped and all ranks have alike. Where tensors have no values, it is spread evenly in their place."""


def as_counted(counts: torch.Tensor, total: int) -> list[int]:
    """What the device counted, whatever was expected."""
    del total
    return counts.tolist()


ALONE = Peers(axes=(), size=1, index=0, group=None, order=(0,))


class Use(Protocol):
    """``use(name, weight)``: a weight, gathered already, as it is multiplied: as PyTorch stores it, outputs first.

    ``component`` names the second use of a tied one; None: the weight's own.
    """

    def __call__(self, name: str, weight: torch.Tensor, component: str | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLinks:
    """The ranks with whom attention is more than a rank's own work.

    ``ring``: those around which keys and values (or the latent) travel. ``heads`` cut the query heads where they
    attend, ``kv_heads`` the KV heads that they meet: where these are fewer axes, a rank takes its own of whole ones.
    ``pieces``: a row lies in so many equal pieces, and these are their places in the text.
    """

    ring: Peers = ALONE
    heads: Peers = ALONE
    kv_heads: Peers = ALONE
    without: Peers = ALONE
    pieces: tuple[int, ...] = IN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """How tokens meet experts.

    ``peers`` share the experts; alone, where their weights travel. ``around``: all tokens come to all of them in a ring;
    otherwise choices travel to their experts alone. ``row`` cut a row of tokens. The row lies in ``len(tiles)`` equal
    pieces over the ranks of ``row``, and ``tiles[i]`` is the place of the i-th of them in the text. ``capacity``:
    tokens of a row that one expert takes at most; None: all. ``buffer_rows``: rows of a rank's buffer of tokens; None: as many
    as come. ``how_many``: see there.
    """

    peers: Peers = ALONE
    around: bool = False
    row: Peers = ALONE
    tiles: tuple[int, ...] = (0,)
    capacity: int | None = None
    buffer_rows: int | None = None
    how_many: HowMany = as_counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All that the mathematics knows of a layout. ``vocab``: by component, the ranks that cut the vocabulary."""

    move: Move
    use: Use
    vocab: Mapping[str, Peers] = field(default_factory=dict)
    attention: AttentionLinks = AttentionLinks()
    experts: ExpertLinks = ExpertLinks()
