"""A vocabulary that its axes do not divide: shards of other sizes at rest, and padding in memory where ``tensor`` shards it.

One device has neither, so it is the oracle.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import OwnedBox, RunPoint, save_checkpoint
from shardwright.core.boxes.box import Box
from shardwright.core.plan.fsdp_groups import weights_of
from shardwright.engine_torch.training.state import tensors_of
from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, assembled, assert_trains_as, in_words, torch_plan, trained
from tests.engine_torch.training import loaded
from tests.matrix import some
from tests.sameness.cases import LLAMA3, MIXTRAL, case

# 257 rows over 4 ranks: 65, 65, 65 and 62. Over 2 ranks and then over 2 more they would be 65, 64, 64 and 64.
SMALL, OTHER = "num_layers=1,vocab=257", "num_layers=1,vocab=513"
UNEVEN = [
    case(LLAMA3, "cp", "data=1,fsdp=2,context=2", settings=SMALL),
    case(MIXTRAL, "ep", "fsdp=2,expert=2", settings=OTHER),
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2", settings=SMALL),
    case(MIXTRAL, "shard-exp-on-fsdp", "fsdp=2,expert=2", settings=SMALL),
    case(MIXTRAL, "fsdp-as-dp-for-attn", "fsdp=2,expert=2", settings=SMALL),
    case(MIXTRAL, "cp-as-ep", "fsdp=1,context=2,expert=2", settings=SMALL),
    case(MIXTRAL, "cp-as-ep", "fsdp=2,context=2,expert=2", settings=SMALL),
]
PADDED = [
    case(LLAMA3, "tp", "tensor=4", settings=SMALL),
    case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings=f"{SMALL},tied=true"),
    # Of five entries, eight in memory, a rank has one and another none.
    case(LLAMA3, "tp", "tensor=4", settings="num_layers=1,vocab=5"),
    case(MIXTRAL, "tp-as-ep", "fsdp=2,tensor=2", settings=OTHER),
]


@pytest.mark.parametrize("case", some(UNEVEN, {0, 1, 2, 4}), ids=in_words)
def test_uneven_shards_train_as_one_device(case: Case, eight: Ranks, run_alone: RunAlone) -> None:
    plan = torch_plan(case)
    (table,) = (one for one in weights_of(plan) if one.weight == "embedding.tokens")
    ranks = range(plan.mesh.num_devices)
    assert len(table.gathered) > 1
    assert len({box and box.shape for box in (table.box(plan.mesh, rank) for rank in ranks)}) > 1
    assert_trains_as(run_alone(case.alone), eight.first(plan.mesh.num_devices), case)


@pytest.mark.parametrize("case", some(PADDED, {0, 1, 2}), ids=in_words)
def test_a_padded_vocabulary_trains_as_on_one_device(case: Case, four: Ranks, run_alone: RunAlone) -> None:
    plan, alone = torch_plan(case), run_alone(case.alone)
    assert plan.by_name["logits.scores"].unpadded is not None
    assert_trains_as(alone, four, case)
    # The boxes that a rank would save cover the vocabulary without padding.
    initial = trained(four, case, 1).initial
    assert {name: array.shape for name, array in initial.items()} == {
        name: array.shape for name, array in alone.initial.items()
    }
    assert all(np.array_equal(array, alone.initial[name]) for name, array in initial.items())


@pytest.mark.parametrize("case", [UNEVEN[0], PADDED[0], PADDED[1], PADDED[2]], ids=in_words)
def test_each_rank_reads_its_rows_and_saves_them(case: Case, four: Ranks, tmp_path: Path) -> None:
    """From a checkpoint with one box for each tensor, in which every element has another value."""
    plan = torch_plan(case)
    infos = tensors_of(plan)
    values = {
        info.name: np.arange(1, 1 + prod(info.shape), dtype=np.float32).reshape(info.shape) + len(info.name)
        for info in infos
    }
    owned = [OwnedBox(name=name, box=Box.whole(array.shape), array=array) for name, array in values.items()]
    point = RunPoint(step=3, seed=0, data_position=24, model="m", layout_name="l", layout_text="", mesh={})
    folder = save_checkpoint(tmp_path, point, list(infos), owned)
    found = assembled(four.run(loaded, plan, folder))
    assert found.keys() == values.keys()
    assert all(np.array_equal(array, found[name]) for name, array in values.items())
