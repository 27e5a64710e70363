"""A stage as a model of its own: the rows of the table for its layers and its ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.model.names import STREAM
from shardwright.core.model.table import Activation, ModelTable, Weight
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.padded import layers_of
from shardwright.core.stages.units import Letter


@lru_cache(maxsize=1024)
def stage_table(table: ModelTable, stage: Stage) -> ModelTable:
    """The weights, activations and moves of a stage. Weights keep their names and the numbers of their layers in the model and in their
    stack, which is why ``num_layers`` is still the model's."""
    # Made once: a plan is followed by those of the fixes that are tried, most of them with the same stages.
    weights = tuple(_weights(table, stage))
    stacks = {w.stack: w.num for w in weights if w.stack is not None}
    activations = tuple(_activations(table, stage, stacks))
    names = {row.name for row in activations}
    return replace(
        table,
        weights=weights,
        activations=activations,
        moves=tuple(move for move in table.moves if {move.source, move.target} <= names),
    )


@lru_cache(maxsize=256)
def program_table(table: ModelTable, stages: tuple[Stage, ...], *, ends: tuple[Letter, ...]) -> ModelTable:
    """What every device holds of a chunk where one program is that of all stages: of each stack as many layers as the stage that has
    the most, and with the first chunk the ``ends`` that stages have."""
    most = {
        weight.stack: max(len(layers_of(weight, stage)) for stage in stages)
        for weight in table.weights
        if weight.stack is not None
    }
    everything = stage_table(table, Stage(layers=range(table.num_layers), embedding="E" in ends, logits="L" in ends))
    return replace(
        everything,
        weights=tuple(
            weight if weight.stack is None else replace(weight, num=most[weight.stack])
            for weight in everything.weights
            if weight.stack is None or most[weight.stack]
        ),
        activations=tuple(
            row
            if row.component in OUTSIDE_LAYERS
            else replace(row, num=max(1, min(row.num, sum(most[stack] for stack in row.stacks or most))))
            for row in everything.activations
        ),
    )


def _weights(table: ModelTable, stage: Stage) -> Iterator[Weight]:
    for weight in table.weights:
        if weight.stack is not None:
            own = layers_of(weight, stage)
            if own:
                first = weight.first_layer + own.start
                yield replace(weight, num=len(own), first_layer=first, first_in_stack=own.start)
        elif weight.uses:
            yield from _tied(weight, stage)
        elif stage.embedding if weight.component == "embedding" else stage.logits:
            yield weight


def _tied(weight: Weight, stage: Stage) -> Iterator[Weight]:
    """A weight with a use at each end: of one stage that has both, or of two, each with its use alone."""
    ends = [end for end, has in (("embedding", stage.embedding), ("logits", stage.logits)) if has]
    own = [use for use in (weight.component, *weight.uses) if use in ends]
    if own:
        yield replace(
            weight,
            component=own[0],
            uses=tuple(own[1:]),
            contracted=tuple(dim for dim in weight.contracted if dim[0] in own),
        )


def _activations(table: ModelTable, stage: Stage, stacks: dict[str, int]) -> Iterator[Activation]:
    for row in table.activations:
        if row.component in OUTSIDE_LAYERS:
            has = {"input": True, "embedding": stage.embedding, "logits": stage.logits}[row.component]
            if has:
                yield row
            continue
        # Masks are those of all layers: they are made once.
        num = sum(stacks.get(name, 0) for name in row.stacks) if row.stacks else min(row.num, len(stage.layers))
        if row.name == STREAM:
            # A stage without layers receives it too.
            num = max(1, num)
        if num:
            yield replace(row, num=num)
