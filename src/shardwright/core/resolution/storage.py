"""The storage dim: the dim of a weight that its storing axes cut at rest, and that is gathered for use.

| engine | storage dim |
|---|---|
| jax | the first logical axis of the weight's storage list that all its storage axes and the axes already on that dim divide together |
| torch | dim 0 as PyTorch stores it, which is what ``fully_shard`` cuts without a copy; it need not divide |
| either | an entry's ``weights:`` names other dims to try, before those of the table |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwright.core.layout.layout import Engine, Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageChoice:
    """Where storing axes that share a list end up.

    ``granted`` None: none of ``tried`` can hold them, or the weight rests whole because it has no list.
    """

    axes: tuple[str, ...]
    tried: tuple[str, ...]
    granted: str | None

    @property
    def refused(self) -> Literal["none-divides", "no-list"] | None:
        """Why there is no dim."""
        if self.granted is not None:
            return None
        return "none-divides" if self.tried else "no-list"


def storage_list(weight: Weight, layout: Layout, axis: str) -> tuple[str, ...]:
    """The logical axes tried for one storing axis, in order."""
    named = layout.entries[axis].weights
    own = tuple(n for n in named if n in weight.logical_axes) if isinstance(named, tuple) else ()
    return own + tuple(n for n in weight.storage if n not in own) if weight.storage else ()


def choose_storage(
    weight: Weight, layout: Layout, mesh: Mesh, engine: Engine, axes: Sequence[str], in_use: dict[str, list[str]]
) -> tuple[StorageChoice, ...]:
    """One choice for each distinct storage list among the storing ``axes``, the longest-standing cuts first.

    ``in_use`` holds the axes that cut each logical axis before storage does.
    """
    lists: dict[tuple[str, ...], list[str]] = {}
    for axis in axes:
        lists.setdefault(storage_list(weight, layout, axis), []).append(axis)
    taken = {name: prod(mesh.size(a) for a in cuts) for name, cuts in in_use.items()}
    choices = []
    for tried, group in lists.items():
        product = mesh.size(group)
        granted = next(
            (n for n in tried if engine == "torch" or weight.size(n) % (product * taken.get(n, 1)) == 0), None
        )
        if granted is not None:
            taken[granted] = taken.get(granted, 1) * product
        choices.append(StorageChoice(axes=tuple(group), tried=tried, granted=granted))
    return tuple(choices)
