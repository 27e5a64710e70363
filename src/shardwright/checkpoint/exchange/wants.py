"""Which process needs which boxes of a tensor: every process knows it of all, from the plan, so nobody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import Owned
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
    processes = [process_of(device) for device in range(plan.mesh.num_devices)]
    return {name: _wants_of_owned(owned, processes) for name, owned in owned_at_rest(plan)}


def _wants_of_owned(owned: Owned, processes: Sequence[int]) -> tuple[Want, ...]:
    """As ``wants_of``, of the boxes of each device. ``processes``: that of each device."""
    if len(set(processes)) < len(processes):
        return wants_of((process, box) for process, boxes in zip(processes, owned, strict=True) for box in boxes)
    # Devices that share boxes share one tuple of them: thousands of boxes are compared once each, in their order.
    same: dict[int, tuple[tuple[Box, ...], list[int]]] = {}
    for process, boxes in zip(processes, owned, strict=True):
        same.setdefault(id(boxes), (boxes, []))[1].append(process)
    needed = [
        (tuple(sorted(set(boxes))) if len(boxes) > 1 else boxes, found) for boxes, found in same.values() if boxes
    ]
    needed.sort(key=lambda one: [(box.start, box.stop) for box in one[0]])
    return tuple(
        Want(boxes, tuple(sorted(process for _, found in group for process in found)))
        for boxes, group in groupby(needed, key=itemgetter(0))
    )
