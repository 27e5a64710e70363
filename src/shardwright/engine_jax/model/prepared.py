"""What is made of a batch once a step, for all layers: the angles of positions, the attention mask, and which tokens are routed.

B rows, T tokens of queries, S tokens of keys. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardwright.core.program.primitives import Attend, Rotate, Route
from shardwright.core.program.program import Step
from shardwright.core.program.walk import Walk
from shardwright.engine_jax.attention.attend import mask_of
from shardwright.engine_jax.experts.route import routed_tokens
from shardwright.engine_jax.io.layer_io import Links
from shardwright.engine_jax.layers.rotate import angles


def prepare(batch: Mapping[str, jax.Array], walk: Walk, links: Links) -> Sequence[Any]:
    """In the order of ``walk.prepared``. ``batch``: its fields, sharded as the input."""
    values = {value: batch[name] for name, value in walk.fields.items() if name in batch}
    for take in walk.of_batch:
        values[take.output] = links.move(take.inputs[0].row, take.output.row, values[take.inputs[0]])

    def prepared(step: Step) -> Any:
        arrays = [values[value] for value in step.inputs if value in values]
        match step.does:
            case Rotate(rope=rope):
                return angles(rope, walk.program.width_of(step.inputs[0]), *arrays)
            case Attend():
                positions_BT, segments_BT, kv_positions_BS, kv_segments_BS = arrays
                return mask_of(positions_BT, segments_BT, kv_positions_BS, kv_segments_BS, links.attention)
            case Route():
                return routed_tokens(*arrays)
            case _:
                raise AssertionError(step)

    return tuple(prepared(step) for step in walk.prepared)
