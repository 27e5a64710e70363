"""Which process needs which boxes of a tensor: every process knows it of all, from the plan, so nobody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import owned_at_rest


@dataclass(frozen=True, slots=True)
class Want:
    """Boxes of one tensor, and all the processes that need exactly these."""

    boxes: tuple[Box, ...]
    processes: tuple[int, ...]


def wants_of(pairs: Iterable[tuple[int, Box]]) -> tuple[Want, ...]:
    """The wants of one tensor, ordered by their boxes. ``pairs``: each process with each box that it needs, in any order.

    >>> rows = Box((0, 0), (2, 4)), Box((2, 0), (4, 4))
    >>> for want in wants_of([(0, rows[0]), (1, rows[1]), (2, rows[0]), (0, rows[0])]):
    ...     print(*want.boxes, want.processes)
    0:2,0:4 (0, 2)
    2:4,0:4 (1,)
    """
    by_process: dict[int, set[Box]] = {}
    for process, box in pairs:
        if box.size:
            by_process.setdefault(process, set()).add(box)
    same: dict[tuple[Box, ...], list[int]] = {}
    for process in sorted(by_process):
        same.setdefault(tuple(sorted(by_process[process])), []).append(process)
    return tuple(Want(boxes, tuple(same[boxes])) for boxes in sorted(same))


def needed_by_all(shape: Sequence[int], count: int) -> tuple[Want, ...]:
    """The want of a tensor that each of ``count`` processes has in full."""
    whole = Box.whole(shape)
    return (Want((whole,), tuple(range(count))),) if whole.size else ()


def wants_of_plan(plan: Plan, process_of: Callable[[int], int]) -> Mapping[str, tuple[Want, ...]]:
    """The wants of every weight, for a load onto a plan. ``process_of``: the process of each device of the mesh."""
    return {
        name: wants_of((process_of(device), box) for device, boxes in enumerate(owned) for box in boxes)
        for name, owned in owned_at_rest(plan)
    }
