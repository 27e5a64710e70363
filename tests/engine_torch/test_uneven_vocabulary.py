"""A vocabulary that its axes do not divide, in shards of other sizes at rest. One device has one shard, so it is the oracle."""

from __future__ import annotations

import pytest

from shardwright.core.plan.fsdp_groups import weights_of
from tests.engine_jax.steps import Case
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import RunAlone, assert_trains_as, in_words, torch_plan
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


@pytest.mark.parametrize("case", some(UNEVEN, {0, 1, 2, 4}), ids=in_words)
def test_uneven_shards_train_as_one_device(case: Case, eight: Ranks, run_alone: RunAlone) -> None:
    plan = torch_plan(case)
    (table,) = (one for one in weights_of(plan) if one.weight == "embedding.tokens")
    ranks = range(plan.mesh.num_devices)
    assert len(table.gathered) > 1
    assert len({box and box.shape for box in (table.box(plan.mesh, rank) for rank in ranks)}) > 1
    assert_trains_as(run_alone(case.alone), eight.first(plan.mesh.num_devices), case)
