"""The storage dim: the dim of a weight that its storage axes shard at rest, and that is gathered for use.

| shards | storage dim |
|---|---|
| even | the first logical axis of the weight's storage list that is divisible by the product of all its storage axes and the axes already on it |
| uneven | dim 0 as its module stores it, which is sharded without a copy; it need not divide. Where it has fewer entries than shards, as 8 experts over 128 ranks, most of them would be padding: then the next dim that divides, if there is one |
| either | an entry's ``weights:`` names other dims to try, before those of the table |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageChoice:
    """The storage dim of storage axes that share a list.

    ``granted`` None: no dim of ``tried`` divides, or the weight is replicated at rest because it has no list.
    """

    axes: tuple[str, ...]
    tried: tuple[str, ...]
    granted: str | None

    @property
    def refused(self) -> Literal["none-divides", "no-list"] | None:
        """Why there is no storage dim; None where there is one."""
        if self.granted is not None:
            return None
        return "none-divides" if self.tried else "no-list"


def storage_list(weight: Weight, layout: Layout, axis: str) -> tuple[str, ...]:
    """The logical axes tried for one storage axis, in order."""
    named = layout.entries[axis].weights
    own = tuple(n for n in named if n in weight.logical_axes) if isinstance(named, tuple) else ()
    return own + tuple(n for n in weight.storage if n not in own) if weight.storage else ()


def choose_storage(
    weight: Weight,
    layout: Layout,
    mesh: Mesh,
    engine: Engine,
    axes: Sequence[str],
    in_use: Mapping[str, Sequence[str]],
) -> tuple[StorageChoice, ...]:
    """One choice for each distinct storage list among the storage ``axes``; earlier choices count for later ones.

    ``in_use`` holds the axes that shard each logical axis before storage axes do.
    """
    lists: dict[tuple[str, ...], list[str]] = {}
    for axis in axes:
        lists.setdefault(storage_list(weight, layout, axis), []).append(axis)
    taken = {name: mesh.size(sharding) for name, sharding in in_use.items()}
    choices, uneven = [], ENGINES[engine].uneven_shards
    for tried, group in lists.items():
        product = mesh.size(group)
        shards = {name: product * taken.get(name, 1) for name in tried}
        granted = next(
            (name for name in tried if _may_store(weight, uneven, name, shards[name])),
            next((name for name in weight.logical_axes[:1] if uneven and name in tried), None),
        )
        if granted is not None:
            taken[granted] = taken.get(granted, 1) * product
            tried = tried[: tried.index(granted) + 1] if uneven else tried
        choices.append(StorageChoice(axes=tuple(group), tried=tried, granted=granted))
    return tuple(choices)


def _may_store(weight: Weight, uneven: bool, name: str, shards: int) -> bool:
    """Whether a dim may be stored in so many shards, without one that is empty."""
    size = weight.size(name)
    return size % shards == 0 or (uneven and name == weight.logical_axes[0] and size >= shards)
