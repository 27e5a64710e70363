"""How the mathematics and the layout meet: what crosses devices is asked of ``Links``, and there is none on one device.

A step runs on each device over its own parts of all arrays (``jax.shard_map`` over the whole mesh). ``move`` carries a
named activation of the table from its owner's layout to the next one's, ``use`` brings a weight from rest into use, and
the rest says over which axes an algorithm of its own (a ring, experts, a cut vocabulary) works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import jax

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.capacity import Traffic
from shardwright.core.plan.attention_kernels import UNPLANNED, ChosenKernel
from shardwright.core.plan.expert_kernels import ExpertKernel
from shardwright.core.plan.movement import Step
from shardwright.core.resolution.row_order import IN_ORDER

Params = Mapping[str, jax.Array]
UseTwice = Callable[[str, jax.Array], tuple[jax.Array, jax.Array]]
"""``use_twice(name, weight)``: a tied weight, brought into use once for both its uses, whose gradients are summed as those of
devices are."""
Move = Callable[[str, str, jax.Array], jax.Array]
"""``move(source, target, array)``: the activation ``source`` as ``target`` needs it; the table has a Move between them."""


class Use(Protocol):
    """``use(name, weight, component)``: one layer of a weight in the dtype and the part in which a device computes.

    ``component`` names the second use of a tied weight; None: the weight's own.
    """

    def __call__(self, name: str, weight: jax.Array, component: str | None = None) -> jax.Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Devices that pass on what they hold, along ``axes``, major first.

    ``numbers``: of each of them, in that order, the number where they are counted along the axes ``in_mesh_order``.
    """

    axes: tuple[str, ...]
    in_mesh_order: tuple[str, ...]
    numbers: tuple[int, ...]

    @classmethod
    def over(cls, mesh: Mesh, axes: tuple[str, ...]) -> Ring:
        return cls(axes=axes, in_mesh_order=mesh.in_mesh_order(axes), numbers=mesh.numbers(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLinks:
    """The axes over which attention is more than a device's own work; all larger than one, major first.

    ``ring``: that around which keys and values (or the latent) travel, if they do. ``heads`` cut the query heads where they
    attend, ``kv_heads`` the KV heads that they meet: where these are fewer axes, a device takes its own of whole ones.
    ``way``: by which algorithm. ``pieces``: a row lies in so many equal pieces, and these are their places in the text.
    """

    ring: Ring | None = None
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    way: ChosenKernel = UNPLANNED
    pieces: tuple[int, ...] = IN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """A ring of experts: how every device gets all devices' tokens, and how what it makes of them is summed back."""

    gather: tuple[Step, ...]
    scatter: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """How tokens meet experts; axes are larger than one, major first.

    ``axes`` cut the experts, none where their weights travel. ``around``: the ring in which all tokens come to all of
    them; None: choices travel to their experts alone. ``row`` cut a row of tokens. The row lies in ``len(tiles)`` equal pieces over the devices of ``row``, and ``tiles[i]`` is the
    place of the i-th of them in the text. ``traffic``: what a device sends and may receive; ``buffer_rows``: rows of its buffer;
    ``products``: by which algorithm these meet their matrices.
    """

    traffic: Traffic
    buffer_rows: int
    products: ExpertKernel

    axes: tuple[str, ...] = ()
    around: Around | None = None
    row: tuple[str, ...] = ()
    tiles: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All that the mathematics knows of a layout.

    ``vocab``: by component, the axes that cut the vocabulary. ``tied_once``: a tied embedding is brought into use once
    for both its uses. ``experts``: None where the model has none.
    """

    move: Move
    use: Use
    use_twice: UseTwice
    vocab: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied_once: bool = True
    attention: AttentionLinks = AttentionLinks()
    experts: ExpertLinks | None = None


def index_of(axes: Sequence[str]) -> jax.Array | int:
    """The number of this device among those of the axes, major first; 0 without axes."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def size_of(axes: Sequence[str]) -> int:
    """The number of devices along the axes together."""
    return prod(jax.lax.axis_size(axis) for axis in axes)
