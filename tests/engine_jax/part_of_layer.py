"""A part of a layer, run by the engine's interpreter: from the value that it takes to what it adds to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from shardwright.core.model.table import ModelTable
from shardwright.core.program.primitives import Take
from shardwright.core.program.program import Step
from shardwright.core.program.walk import steps_of
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.io.layer_io import InUse, Links
from shardwright.engine_jax.model.interpreter import Interpreter
from shardwright.engine_jax.model.prepared import prepare
from shardwright.models.layers.decoder import walk_of


def added_by_part(
    first: str,
    last: str,
    x_BLM: jax.Array,
    batch: Mapping[str, Any],
    weights: InUse,
    table: ModelTable,
    links: Links,
    stack: str,
) -> tuple[jax.Array, MoeCounts | None]:
    """``first``: the name under which the part takes ``x_BLM``; ``last``: of what it adds, before that is taken to the stream."""
    walk = walk_of(table.architecture)
    operations = walk.layers[stack]
    takes = {
        number: one for number, one in enumerate(operations) if isinstance(one, Step) and isinstance(one.does, Take)
    }
    start = next(number for number, take in takes.items() if take.output.name == first)
    stop = next(number for number, take in takes.items() if take.inputs[0].name == last)
    needed, part = {takes[stop].output}, []
    for operation in reversed(operations[start : stop + 1]):
        steps = steps_of(operation)
        if not needed.isdisjoint(steps[-1].outputs):
            part.insert(0, operation)
            needed.update(value for step in steps for value in step.inputs)
    interpreter = Interpreter(walk=walk, weights=weights, prepared=prepare(batch, walk, links), links=links)
    values, counts = interpreter.run(part, {takes[start].inputs[0]: x_BLM})
    return values[takes[stop].output], counts
