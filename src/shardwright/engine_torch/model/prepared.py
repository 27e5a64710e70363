"""What is made of a batch once for all layers: the angles of positions, the attention mask, and which tokens are routed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardwright.core.program.primitives import Attend, Rotate, Route
from shardwright.core.program.program import Step
from shardwright.core.program.walk import Walk, steps_of
from shardwright.engine_torch.attention.attend import mask_of
from shardwright.engine_torch.experts.route import routed_tokens
from shardwright.engine_torch.io.layer_io import Links
from shardwright.engine_torch.layers.rotate import angles


class Preparation:
    """What the layers of some stacks read. ``kept_as``: see ``mask_of``."""

    def __init__(self, walk: Walk, stacks: Collection[str], links: Links, kept_as: torch.dtype | None) -> None:
        self._walk, self._links, self._kept_as = walk, links, kept_as
        steps = [step for name in stacks for operation in walk.layers[name] for step in steps_of(operation)]
        read = {walk.prepared_at(step) for step in steps}
        self._steps = [step if place in read else None for place, step in enumerate(walk.prepared)]
        needed = {value for step in self._steps if step is not None for value in step.inputs}
        for take in reversed(walk.of_batch):
            needed |= {*take.inputs} if take.output in needed else set()
        self._takes = [take for take in walk.of_batch if take.output in needed]

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Sequence[Any]:
        """In the order of ``walk.prepared``; None: what no layer reads. ``batch``: its fields, sharded as the input."""
        values = {value: batch[name] for name, value in self._walk.fields.items() if name in batch}
        for take in self._takes:
            (source,) = take.inputs
            values[take.output] = self._links.move(source.row, take.output.row, values[source])
        return [
            None if step is None else self._made(step, [values[value] for value in step.inputs if value in values])
            for step in self._steps
        ]

    def _made(self, step: Step, arrays: Sequence[torch.Tensor]) -> Any:
        match step.does:
            case Rotate(rope=rope):
                return angles(rope, self._walk.program.width_of(step.inputs[0]), *arrays)
            case Attend():
                return mask_of(*arrays, kept_as=self._kept_as, links=self._links.attention)
            case Route():
                return routed_tokens(*arrays)
            case _:
                raise AssertionError(step)
