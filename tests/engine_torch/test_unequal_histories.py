"""Of a run on ranks: weights and amaxes that differ on one rank are refused on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint import CheckpointError
from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.training.state import boxes_of, delayed_boxes, initial_state, weight_replicas
from shardwright.runs.processes.group import ExchangedValue
from shardwright.runs.processes.replicas import require_equal, unequal_weights
from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import torch_plan
from tests.engine_torch.training import model_of

CASE = Case(model="mixtral-test", layout="ep", mesh="fsdp=2,expert=2")
NAME = "delayed.history/layers.attention.o.input"


class OverRanks:
    """What the processes of a run exchange, sent by PyTorch."""

    def __init__(self) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()

    def exchange(self, name: str, value: object, timeout_s: float = 0) -> list[ExchangedValue]:
        del name, timeout_s
        answers: list[object] = [None] * self.count
        dist.all_gather_object(answers, value)
        return [ExchangedValue(one, process) for process, one in enumerate(answers) if one not in answers[:process]]


def compared(plan: Plan) -> tuple[str, str, int, int]:
    """What a rank reads where all histories are equal, and where one rank has another; how many boxes it holds, and saves."""
    state = initial_state(model_of(plan), 0)
    (stage,) = state.model.stages.values()
    found = []
    for fault in (0.0, 0.5):
        if dist.get_rank() == 3:
            stage.delayed[NAME.partition("/")[2]].history[1, 2] = fault
        try:
            require_equal(delayed_boxes(state), OverRanks(), 1)
            found.append("")
        except CheckpointError as error:
            found.append(str(error).split(" Nothing")[0])
    saved = [one for one in boxes_of(state) if one.name.startswith("delayed.")]
    return found[0], found[1], len(list(delayed_boxes(state))), len(saved)


def test_a_history_that_differs_on_one_rank_is_named_on_all(four: Ranks) -> None:
    plan = torch_plan(CASE, precision=preset("fp8-delayed", amax_history_len=4))
    text = (
        f"the checkpoint of step 1: '{NAME}' [0:2,0:4] must be the same on all devices that hold it, and element 6 is 0.0 in process 0, "
        f"0.5 in process 3."
    )
    num = len(plan.delayed_tensors)
    ranks = four.run(compared, plan)
    assert [one[:3] for one in ranks] == [("", text, num)] * 4
    # Those of experts are of two ranks, the others of the first.
    assert ranks[0][3] == num
    assert 0 < ranks[1][3] < num
    assert [one[3] for one in ranks[2:]] == [0, 0]


def compared_weights(plan: Plan) -> tuple[str | None, str | None]:
    """What a rank reads where all weights are equal, and where one rank has another one."""
    state = initial_state(model_of(plan), 0)
    equal = unequal_weights(weight_replicas(state), OverRanks(), 1)
    if dist.get_rank() == 3:
        with torch.no_grad():
            local_of(state.model.parameters()["layers.1.attention.q"]).view(-1)[0] += 1e-7
    return equal, unequal_weights(weight_replicas(state), OverRanks(), 1)


@pytest.mark.parametrize(("layout", "mesh"), [("hsdp", "data=2,fsdp=2"), ("ddp", "data=4")])
def test_a_weight_that_differs_on_one_rank_is_named_on_all(four: Ranks, layout: str, mesh: str) -> None:
    answers = four.run(compared_weights, torch_plan(Case(model="llama3-test", layout=layout, mesh=mesh)))
    assert len(set(answers)) == 1
    equal, unequal = answers[0]
    assert equal is None
    assert unequal is not None
    assert unequal.startswith("step 1: weight 'layers.attention.q' [1:2,"), unequal
    assert "must have the same bits on all devices that hold it, and has not (processes " in unequal
