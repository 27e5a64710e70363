"""Timetables of pipelines against those that PyTorch makes for its own schedules, action by action."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as of_torch

from shardwright.core.schedules.actions import Action
from shardwright.core.schedules.schedules import SCHEDULES, table_of

NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Stage:
    """What a schedule of PyTorch asks of a stage before it runs."""

    submod = group = stage_index_to_group_rank = None
    has_backward, device = True, "cpu"

    def __init__(self, number: int, stages: int, ranks: int):
        self.stage_index, self.num_stages = number, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = number == 0, number == stages - 1


def theirs(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    made = getattr(of_torch, NAMES[name])
    stages = ranks * virtual
    if issubclass(made, of_torch.PipelineScheduleSingle):
        schedule = made(Stage(0, stages, ranks), microbatches, loss_fn=print)
        order = schedule._get_pipeline_order()
    else:
        own = (0, stages - 1) if SCHEDULES[name].placement == "v" else range(0, stages, ranks)
        order = made([Stage(number, stages, ranks) for number in own], microbatches, loss_fn=print).pipeline_order
    return [
        [
            str(action)
            for slot in order[rank]
            if slot is not None
            for action in slot.sub_actions or (slot,)
            if action.computation_type != of_torch.REDUCE_GRAD
        ]
        for rank in range(ranks)
    ]


def ours(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    actions = [list(of_rank) for of_rank in table_of(name, ranks, virtual, microbatches).actions]
    if name == "1f1b":
        # PyTorch's listing of this schedule, which its run does not use, counts the last rank's forward passes from 1.
        actions[-1] = [
            Action(one.stage, one.kind, one.microbatch + 1) if one.kind == "forward" else one for one in actions[-1]
        ]
    return [[str(action) for action in of_rank] for of_rank in actions]


def compare(ranks: range | tuple[int, ...], virtuals: tuple[int, ...], microbatches: range | tuple[int, ...]) -> int:
    compared = 0
    for name, schedule in SCHEDULES.items():
        for count in ranks:
            for virtual in (schedule.virtual,) if schedule.virtual else virtuals:
                for number in microbatches:
                    if name not in NAMES:
                        continue
                    if not schedule.runs(count, virtual, number):
                        with pytest.raises(ValueError, match="microbatch"):
                            theirs(name, count, virtual, number)
                        continue
                    assert ours(name, count, virtual, number) == theirs(name, count, virtual, number), (
                        name,
                        count,
                        virtual,
                        number,
                    )
                    compared += 1
    return compared


def test_tables_are_those_of_pytorch():
    assert compare((2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 7, 8, 16)) > 100


@pytest.mark.matrix
def test_all_tables_are_those_of_pytorch():
    assert compare(range(2, 9), (1, 2, 3, 4), range(1, 33)) > 2000
