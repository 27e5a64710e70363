"""The layers of a stack where one program is that of all stages: in an array that is equally large on all ranks.

Each rank has as many rows for each of its stages as the stage that has the most layers. The other rows are padding: they compute
nothing, and no checkpoint has them. A checkpoint has the layers by their numbers in the stack, whatever stage had them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import ModelTable, Weight
from shardwright.core.schedules.actions import Placement, stages_of
from shardwright.core.stages.assignment import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStack:
    """``stages``: the numbers in the stack of each stage's layers, rank after rank and of a rank chunk after chunk, as they are in
    the array. ``most``: the rows of each.

    >>> stack = PaddedStack(stages=(range(0, 3), range(3, 5)), most=3)
    >>> stack.layers
    (0, 1, 2, 3, 4, None)
    >>> [f"{rows} = {saved}" for rows, saved in stack.saved(Box((1, 0), (6, 8)))]
    ['1:3,0:8 = 1:3,0:8', '3:5,0:8 = 3:5,0:8']
    """

    stages: tuple[range, ...]
    most: int

    @property
    def rows(self) -> int:
        """The rows of all ranks."""
        return len(self.stages) * self.most

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The number in the stack of each row's layer; None of padding."""
        return tuple(own.start + row if row < len(own) else None for own in self.stages for row in range(self.most))

    def of_first(self, num: int) -> PaddedStack:
        """The same rows, of which only those of the stack's ``num`` first layers are no padding."""
        return replace(self, stages=tuple(range(min(own.start, num), min(own.stop, num)) for own in self.stages))

    def saved(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """The parts of a box of the array that are layers, each with the box of the stack that a checkpoint has of it."""
        for place, own in enumerate(self.stages):
            first = place * self.most
            start, stop = max(box.start[0], first), min(box.stop[0], first + len(own))
            if start < stop:
                moved = own.start - first
                yield (
                    Box((start, *box.start[1:]), (stop, *box.stop[1:])),
                    Box((start + moved, *box.start[1:]), (stop + moved, *box.stop[1:])),
                )


def padded_stack(
    table: ModelTable, stack: str, stages: Sequence[Stage], ranks: int, placement: Placement
) -> PaddedStack:
    """The array of a stack under an assignment of layers to stages."""
    row = next(weight for weight in table.weights if weight.stack == stack)
    own = [layers_of(row, stage) for stage in stages]
    in_order = [
        own[number] for rank in range(ranks) for number in stages_of(rank, ranks, len(stages) // ranks, placement)
    ]
    return PaddedStack(stages=tuple(in_order), most=max(map(len, own)))


def layers_of(weight: Weight, stage: Stage) -> range:
    """The layers that a stage has of a weight, by their numbers in the stack; empty where it has none."""
    first = max(weight.first_layer, stage.layers.start) - weight.first_layer
    last = min(weight.first_layer + weight.num, stage.layers.stop) - weight.first_layer
    return range(first, max(first, last))
