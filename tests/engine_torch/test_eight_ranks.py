"""Eight ranks, for what four cannot test: three axes, and axes of different sizes in another order.

With two axes of two, the order of shards and its inverse are the same.
"""

from __future__ import annotations

import pytest
import torch

from shardwright.core.mesh.mesh import Mesh
from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.redistributing import by_hand, each_collective, wrong_after_steps
from tests.engine_torch.runs import RunAlone, assert_trains_as, in_words
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

SEEDS = range(100)
UNLIKE, THREE = Mesh.of(a=2, b=4), Mesh.of(a=2, b=2, c=2)


@pytest.mark.parametrize("mesh", [UNLIKE, THREE], ids=str)
def test_every_rank_has_its_shard_of_the_sum(mesh: Mesh, eight: Ranks) -> None:
    assert eight.run(wrong_after_steps, mesh, SEEDS, torch.float32) == [[]] * 8


@pytest.mark.parametrize(
    ("mesh", "axes", "order"),
    [
        (UNLIKE, ("a", "b"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (UNLIKE, ("b", "a"), [0, 2, 4, 6, 1, 3, 5, 7]),
        (THREE, ("b", "c", "a"), [0, 2, 4, 6, 1, 3, 5, 7]),
        (THREE, ("c", "a", "b"), [0, 4, 1, 5, 2, 6, 3, 7]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_each_collective(mesh: Mesh, axes: tuple[str, ...], order: list[int], eight: Ranks) -> None:
    """``order``: the number of each rank's shard."""
    assert eight.run(each_collective, mesh, axes) == [by_hand(index, 8) for index in order]


ON_EIGHT = [
    case(LLAMA3, "fsdp-tp", "data=2,fsdp=2,tensor=2"),
    case(LLAMA3, "cp-tp", "fsdp=2,context=2,tensor=2", "attention=ulysses"),
    case(MIXTRAL, "cp-as-ep", "fsdp=2,context=2,expert=2"),
    case(DEEPSEEK3, "ep-tp", "fsdp=2,expert=2,tensor=2"),
]


@pytest.mark.parametrize("case", some(ON_EIGHT, (1, 2, 3)), ids=in_words)
def test_eight_ranks_train_as_one_device(case: Case, eight: Ranks, run_alone: RunAlone) -> None:
    assert_trains_as(run_alone(case.alone), eight, case)
