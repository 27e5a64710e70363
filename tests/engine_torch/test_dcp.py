"""The calls of ``torch.distributed.checkpoint`` over our checkpoints, on ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import open_newest, verify
from tests.engine_torch import own_dcp
from tests.engine_torch.own_dcp import load_small, save_small
from tests.engine_torch.own_saved import Sharding, numbered
from tests.engine_torch.ranks import Ranks, one_answer
from tests.engine_torch.test_own_saved_refused import OF_ONE, SAME_ON_ALL
from tests.matrix import rest

PAIRS: list[tuple[Sharding, Sharding]] = [
    (("fsdp-tp", (3, 2)), ("fsdp", (4,))),
    rest((("fsdp", (4,)), ("fsdp-tp", (2, 2, 2)))),
    (("tp", (4,)), ("fsdp-tp", (2, 3))),
    rest((("replicated", (2,)), ("fsdp-tp", (4, 2)))),
    rest((("fsdp-tp", (4, 2)), ("replicated", (2,)))),
]


def ranks_of(eight: Ranks, sharding: Sharding) -> Ranks:
    return eight.first(int(np.prod(sharding[1])))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_another_sharding_loads_what_was_saved(eight: Ranks, pair: tuple[Sharding, Sharding], tmp_path: Path) -> None:
    before, after = pair
    ranks_of(eight, before).run(save_small, *before, str(tmp_path))
    assert verify(tmp_path)["ok"]
    checkpoint = open_newest(tmp_path)
    for name, weight in numbered().named_parameters():
        np.testing.assert_array_equal(checkpoint.read_box(f"model.{name}"), weight.detach().numpy(), err_msg=name)
    assert one_answer(ranks_of(eight, after).run(load_small, *after, str(tmp_path))) == ([], 8)


def test_a_module_as_it_is(four: Ranks, tmp_path: Path) -> None:
    assert one_answer(four.run(own_dcp.as_stateful, str(tmp_path))) == []


def test_a_checkpoint_has_no_pickle(four: Ranks, tmp_path: Path) -> None:
    four.run(save_small, "fsdp", (4,), str(tmp_path))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".index", ".safetensors", ""}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.suffix] == [".lock"]


@pytest.mark.parametrize("case", SAME_ON_ALL)
def test_what_ranks_do_not_hold_alike(four: Ranks, case: str, tmp_path: Path) -> None:
    """The messages are those of our own save, but for what DCP says first."""
    found, _ = one_answer(four.run(own_dcp.refused, case, str(tmp_path)))
    needed = SAME_ON_ALL[case].removeprefix("module['_extra_state']").replace(" Nothing was saved.", "")
    assert (
        needed.split("If each is a shard")[0].strip() in found or "Give all the same, or a name for each." in found
    ), found
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("case", OF_ONE)
def test_what_one_rank_does_not_have_ends_the_save_of_all(four: Ranks, case: str, tmp_path: Path) -> None:
    failed, reason = OF_ONE[case]
    assert one_answer(four.run(own_dcp.refused, case, str(tmp_path))) == (reason, [failed])
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_rank_that_cannot_write_leaves_the_step_before(four: Ranks, tmp_path: Path) -> None:
    four.run(save_small, "fsdp", (4,), str(tmp_path))
    assert one_answer(four.run(own_dcp.one_rank_fails, str(tmp_path))) == ("no disk", [1])
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [".lock", "step-00000001"]
    assert one_answer(four.run(load_small, "fsdp", (4,), str(tmp_path))) == ([], 8)
    four.run(save_small, "fsdp", (4,), str(tmp_path), 2)


def test_a_load_that_one_rank_cannot_do_ends_for_all(four: Ranks, tmp_path: Path) -> None:
    four.run(save_small, "fsdp", (4,), str(tmp_path))
    message, ranks = one_answer(four.run(own_dcp.one_rank_needs_another_shape, str(tmp_path)))
    assert "'model.up.bias': shape: found (7,), needed (8,)" in message
    assert ranks == [2]


def test_another_planner_is_refused(four: Ranks, tmp_path: Path) -> None:
    message, _ = one_answer(four.run(own_dcp.without_our_planner, str(tmp_path)))
    assert message.startswith("StorageWriter needs the planner that knows which rows a rank holds")
