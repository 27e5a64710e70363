"""From an architecture to its table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardwright.core.model.table import ModelTable
from shardwright.core.program.dims import LETTERS
from shardwright.core.program.rows import Rows, rows_of
from shardwright.models.layers.decoder import program_of
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention
from shardwright.models.parts.size import Size


def table_of(
    family: str, name: str, architecture: Architecture, size: Size[Any], published: Mapping[str, str]
) -> ModelTable:
    """The table of an architecture, with all of a size but its dimensions. ``published``: names of weights in published checkpoints, by
    their names in a layer."""
    attention, experts = architecture.attention, architecture.experts
    rows = _rows_of(architecture, tuple(published.items()))
    return ModelTable(
        family=family,
        name=name,
        sizes={LETTERS[dim]: number for dim, number in program_of(architecture).sizes.items()},
        weights=rows.weights,
        activations=rows.activations,
        moves=rows.moves,
        operations=rows.operations,
        names=rows.names,
        num_layers=sum(stack.num for stack in architecture.stacks),
        dtype=size.dtype,
        top_k=experts.top_k if experts else None,
        expert_groups=experts.num_groups if experts else 1,
        chosen_groups=experts.chosen_groups if experts else 1,
        capacity_factor=experts.capacity_factor if experts else None,
        attention_window=attention.window if isinstance(attention, GroupedQueryAttention) else None,
        owner="ours",
        architecture=architecture,
        natural_layout=size.natural.layout,
        natural_mesh=size.natural.mesh,
        natural_batch=size.natural.batch,
        natural_length=size.natural.length,
        training_only=size.training_only,
    )


@lru_cache(maxsize=64)
def _rows_of(architecture: Architecture, published: tuple[tuple[str, str], ...]) -> Rows:
    return rows_of(program_of(architecture), dict(published))
