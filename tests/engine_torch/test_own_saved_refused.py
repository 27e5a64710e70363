"""Ranks that do not hold what they should: no checkpoint keeps one of them and loses the others, and all get one message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import open_newest
from tests.engine_torch import own_refused
from tests.engine_torch.own_block import plan_of
from tests.engine_torch.own_saved import load_small, save_small
from tests.engine_torch.ranks import Ranks, one_answer

EQUAL = "equal names with other values, of which a checkpoint would keep one; nothing was saved:\n  "
ADVICE = (
    "\nIf they should be equal, they have diverged: make them equal first. If each is a shard of its own (of tensor or expert "
    "parallelism), say so in its placements, or give each a name of its own."
)
SAME_ON_ALL = {
    "tensor parallelism of plain tensors": f"{EQUAL}'weight', box [0:2,0:2]: rank 0 and rank 1 hold other values\n  'weight', box "
    f"[2:4,0:2]: rank 2 and rank 3 hold other values{ADVICE}",
    "experts of each rank": f"{EQUAL}'experts', box [0:2,0:3]: rank 0 and rank 1 and rank 2 and 1 more groups hold other "
    f"values{ADVICE}",
    "replicas that have diverged": f"{EQUAL}'w', box [0:2]: ranks 0, 1 and 2 and rank 3 hold other values{ADVICE}",
    "one replica of a shard": f"{EQUAL}'w', box [0:2]: rank 0 and rank 2 hold other values{ADVICE}",
    "another shape on one rank": "'w' is float32 (2,) on rank 0 and float32 (3,) on rank 1. If each is a shard of its own, say so "
    "in its placements, or give each a name of its own. Nothing was saved.",
    "rows that from_local counts wrong": "'w' is float32 (12, 2) on rank 0 and float32 (4, 2) on rank 3. If each is a shard of its "
    "own, say so in its placements, or give each a name of its own. Nothing was saved.",
    "a sum over ranks": "'w' is partial: its value is a sum over ranks. Reduce it first, by redistribute.",
    "a mesh in another order than its group": "'w': its DeviceMesh has the ranks [3, 2, 1, 0] along 'dp', and their process group has them "
    "in ascending order. Make the mesh of ranks that ascend along each dim, as init_device_mesh does.",
    "other values of an option": "module['_extra_state'] is 0 on rank 0 and 1 on rank 2: a checkpoint has one value for all. Give "
    "all the same, or a key for each.",
}
OF_ONE = {
    "a shape that placements do not give": (
        3,
        "'w': this rank holds (1, 2), and no shard of (12, 2) under S(0) on 4 has that shape. Where the DTensor was made by "
        "from_local, give it the shape and the stride of the unsharded tensor.",
    ),
    "a value of one rank": (
        2,
        "'_extra_state' is a builtins.set: a checkpoint holds tensors, and values that JSON has; it never pickles. Save what it "
        "consists of, or leave it out.",
    ),
}


@pytest.mark.parametrize("case", SAME_ON_ALL)
def test_what_all_ranks_refuse(four: Ranks, case: str, tmp_path: Path) -> None:
    assert one_answer(four.run(own_refused.refused, case, str(tmp_path))) == SAME_ON_ALL[case]
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("case", OF_ONE)
def test_what_one_rank_refuses_ends_the_save_of_all(four: Ranks, case: str, tmp_path: Path) -> None:
    failed, reason = OF_ONE[case]
    answers = four.run(own_refused.refused, case, str(tmp_path))
    others = f"the state to save: rank {failed} of 4 could not do it. Its error: {reason}"
    assert answers == [reason if rank == failed else others for rank in range(4)]
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_rank_that_cannot_write_leaves_nothing(four: Ranks, tmp_path: Path) -> None:
    four.run(save_small, "fsdp", (4,), str(tmp_path))
    answers = four.run(own_refused.full_disk, str(tmp_path))
    others = "the checkpoint of step 2, write: process 1 of 4 could not do it. Its error: no disk: ENOSPC"
    assert answers == [others, "no disk: ENOSPC", others, others]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [".lock", "step-00000001"]
    assert four.run(load_small, "fsdp", (4,), str(tmp_path)) == [[]] * 4


def test_a_rank_that_fails_between_two_reads_ends_the_load_of_all(four: Ranks, tmp_path: Path) -> None:
    """The others wait for it in the next read."""
    four.run(save_small, "fsdp", (4,), str(tmp_path))
    answers = four.run(own_refused.fails_between, str(tmp_path))
    step = tmp_path / "checkpoints" / "step-00000001"
    others = f"{step}: rank 2 of 4 ended its load. Its error: no room on this device"
    assert [said for said, _ in answers] == [others, others, "no room on this device", others]
    assert max(took for _, took in answers) < 20
    # The group of the ranks is as good as before.
    assert four.run(load_small, "fsdp", (4,), str(tmp_path)) == [[]] * 4


def test_rows_with_gaps_are_several_boxes(four: Ranks, tmp_path: Path) -> None:
    answers = four.run(own_refused.strided, str(tmp_path))
    assert all(held == loaded for held, loaded in answers)
    np.testing.assert_array_equal(open_newest(tmp_path).read_box("w"), np.arange(8, dtype=np.float32))


def test_ranks_may_have_tensors_and_values_of_their_own(four: Ranks, tmp_path: Path) -> None:
    answers = four.run(own_refused.other_keys, str(tmp_path))
    assert one_answer([answer["values"] for answer in answers]) == {"rows": {f"rank {rank}": rank for rank in range(4)}}
    assert [answer["found"] for answer in answers] == [[float(rank)] * 2 for rank in range(4)]
    assert sorted(open_newest(tmp_path).tensors) == ["shared", "stage0", "stage1", "stage2", "stage3"]


def test_all_ranks_take_one_step(four: Ranks, tmp_path: Path) -> None:
    for step in (1, 2):
        assert one_answer(four.run(own_refused.another_step_of_each, str(tmp_path), step))[0] == str(step)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 1}, {"data": 1, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_module_that_a_plan_has_sharded(four: Ranks, sizes: dict[str, int], tmp_path: Path) -> None:
    tensor = {"elsewhere": "tensor", "residual": "idle"}
    plan = plan_of({"data": "data", "fsdp": "fsdp", "tensor": tensor}, sizes)
    assert four.run(own_refused.parallelized, plan, str(tmp_path)) == [[]] * 4
