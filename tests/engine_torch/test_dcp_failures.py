"""What ``torch.distributed.checkpoint`` was seen to do, each as a test of what happens here instead.

The ranks do not exist: their calls are made one after the other, so that a rank can end at any of them. What ranks do not hold alike is
in ``test_own_saved_refused.py`` and ``test_dcp.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.checkpoint import CheckpointError, DamagedError, open_newest, verify
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.dcp import SavePlanner, StorageWriter
from tests.engine_torch.dcp_imagined import MakeState, State, load_all, save_all, states

NAMES = ("x",)


def rows(value: float | None = None, dtype: torch.dtype = torch.float32, size: int = 8, **others: Any) -> MakeState:
    """A rank's state: a tensor sharded by rows, whose elements are their numbers or all one value, and other values."""

    def make(mesh: DeviceMesh, rank: int) -> State:
        first, stop = (size * each // mesh.size() for each in (rank, rank + 1))
        numbers = (
            torch.arange(first, stop, dtype=dtype) if value is None else torch.full((stop - first,), value, dtype=dtype)
        )
        placed = DTensor.from_local(numbers, mesh, [Shard(0)], run_check=False, shape=torch.Size((size,)), stride=(1,))
        return {"w": placed, **others}

    return make


def saved(folder: Path, step: int = 1, count: int = 2, **options: Any) -> Path:
    save_all(folder, step, states((count,), NAMES, rows(**options)))
    return folder / "checkpoints" / f"step-{step:08d}"


def loaded(folder: Path, count: int = 2, **options: Any) -> list[float]:
    found = states((count,), NAMES, rows(-1.0, **options))
    load_all(folder, found)
    return torch.cat([one["w"].to_local() for one in found]).tolist()


def half_saved(folder: Path, step: int, value: float) -> None:
    """A save of two ranks, of which the second ends before it writes."""
    two = states((2,), NAMES, rows(value))
    planners, writers = [SavePlanner(), SavePlanner()], [StorageWriter(folder, step), StorageWriter(folder, step)]
    plans = []
    for rank in range(2):
        planners[rank].set_up_planner(two[rank], None, rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writers[rank].prepare_local_plan(planners[rank].create_local_plan()))
    plans, _ = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    writers[0].write_data(planners[0].finish_plan(plans[0]), planners[0])


def test_a_save_that_ends_before_its_commit_is_no_checkpoint(tmp_path: Path) -> None:
    half_saved(tmp_path, 1, 1.0)
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        loaded(tmp_path)


def test_a_rank_that_ends_in_a_second_save_leaves_no_mixture_of_two_steps(tmp_path: Path) -> None:
    saved(tmp_path, 1, value=1.0)
    half_saved(tmp_path, 2, 2.0)
    assert loaded(tmp_path) == [1.0] * 8


def test_a_step_is_what_was_saved_as_that_step(tmp_path: Path) -> None:
    saved(tmp_path, 1, value=1.0)
    with pytest.raises(CheckpointError, match="this step was saved before, and a checkpoint is never overwritten"):
        saved(tmp_path, 1, value=2.0)
    assert loaded(tmp_path) == [1.0] * 8
    saved(tmp_path, 2, value=2.0)
    assert loaded(tmp_path) == [2.0] * 8


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    directory, random = saved(tmp_path), np.random.default_rng(0)
    for file in sorted(path for path in directory.iterdir()):
        data = file.read_bytes()
        for place in random.choice(8 * len(data), 12, replace=False):
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << (place % 8)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError):
                loaded(tmp_path)
        file.write_bytes(data)
    assert loaded(tmp_path) == list(range(8))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-4], lambda data: bytes(len(data)), lambda _: b""], ids=["short", "zero", "empty"]
)
def test_a_truncated_or_zeroed_file_is_no_valid_step(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    directory = saved(tmp_path)
    file = sorted(directory.glob("boxes-*"))[1]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DamagedError, match=file.name):
        loaded(tmp_path)


def test_a_rank_that_leaves_out_its_rows_cannot_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load would leave its destination as it was."""
    monkeypatch.setattr("shardwright.engine_torch.dcp.plan.holders_of", lambda ranks: _without_the_last(ranks))
    with pytest.raises(
        CheckpointError, match=r"not covered exactly once by its boxes: no box covers \[4:8\]"
    ) as caught:
        saved(tmp_path)
    assert caught.value.code == "SW501"
    assert not list(tmp_path.rglob("manifest.json"))


def _without_the_last(ranks: Any) -> Any:
    return {(name, box): (0,) for name, boxes in ranks[0].boxes.items() for box in boxes}


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (torch.float32, torch.int32),
        (torch.int32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_another_dtype_is_not_cast_silently(tmp_path: Path, stored: torch.dtype, asked: torch.dtype) -> None:
    saved(tmp_path, value=1.0, dtype=stored)
    names = [str(one).removeprefix("torch.") for one in (stored, asked)]
    with pytest.raises(CheckpointError, match=f"'w': dtype: found {names[0]}, needed {names[1]}"):
        loaded(tmp_path, dtype=asked)


def test_a_name_that_is_missing_or_extra_and_another_shape_are_named(tmp_path: Path) -> None:
    saved(tmp_path, extra=torch.zeros(2), next_row=3)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, size=6, bias=torch.zeros(2))
    assert [line.strip() for line in str(caught.value).split("\n")[1:]] == [
        "'w': shape: found (8,), needed (6,)",
        "'bias': missing",
        "'extra': extra, float32 (2,), which is not asked for",
        "'next_row': extra, 3, which is not asked for",
        "On request: only=[patterns] loads some of the names.",
    ]
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, extra=torch.zeros(2), next_rows=3)
    assert [line.strip() for line in str(caught.value).split("\n")[1:3]] == [
        "'next_rows': missing; the checkpoint has 'next_row'",
        "'next_row': extra, 3, which is not asked for",
    ]


def test_a_save_of_fewer_ranks_leaves_no_stale_files(tmp_path: Path) -> None:
    saved(tmp_path, 1, count=4)
    directory = saved(tmp_path, 2, count=2)
    assert sorted(path.name[:11] for path in directory.glob("boxes-*")) == ["boxes-00000", "boxes-00001"]
    assert loaded(tmp_path, count=4) == list(range(8))


def test_options_of_an_optimizer_leave_the_files_readable(tmp_path: Path) -> None:
    options = {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"]}], "done": 3}
    directory = saved(tmp_path, **options)
    for file in directory.glob("boxes-*"):
        with safe_open(file, "numpy") as opened:
            assert list(opened.keys())
    assert json.loads((directory / "manifest.json").read_text())["format"] == "shardwright-checkpoint"
    found = states((2,), NAMES, rows(0.0, param_groups=[{"lr": 0.0, "betas": None, "params": None}], done=0))
    load_all(tmp_path, found)
    assert {name: one for name, one in found[1].items() if name != "w"} == options


def test_what_json_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^'sampler\.state' is a builtins\.bytearray: .* it never pickles"):
        saved(tmp_path, sampler={"state": bytearray(3)})
    assert not list(tmp_path.rglob("manifest.json"))


def fused(mesh: DeviceMesh, rank: int) -> State:
    """A fused projection, gate above up: each rank has its rows of both."""
    mine = torch.tensor([float(row) for half in (0, 8) for row in range(half + 2 * rank, half + 2 * rank + 2)])
    placed = DTensor.from_local(
        mine, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=torch.Size((16,)), stride=(1,)
    )
    return {"w": placed}


def test_a_fused_projection_is_saved_and_loaded_with_its_rows(tmp_path: Path) -> None:
    save_all(tmp_path, 1, states((4,), NAMES, fused))
    assert open_newest(tmp_path).read_box("w").tolist() == list(range(16))
    # By rows, of which no rank has both halves, and back.
    assert loaded(tmp_path, size=16) == list(range(16))
    again = states((4,), NAMES, fused)
    needed = [one["w"].to_local().tolist() for one in again]
    for one in again:
        one["w"].to_local().zero_()
    load_all(tmp_path, again)
    assert [one["w"].to_local().tolist() for one in again] == needed


def test_the_newest_step_that_is_damaged_is_an_error_and_not_skipped_silently(tmp_path: Path) -> None:
    saved(tmp_path, 1, value=1.0)
    file = next(saved(tmp_path, 2, value=2.0).glob("boxes-*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="step-00000002"):
        loaded(tmp_path)
    assert not verify(tmp_path)["ok"]


def test_a_step_is_named_by_a_checkpoint_id(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    writer.reset("outputs/checkpoint/step-100")
    writer.set_up_storage_writer(True, rank=0)
    with pytest.raises(
        InputError, match=r"^checkpoint_id: 'last' does not end in the number of a step, as step-100 does\.$"
    ):
        writer.reset("outputs/checkpoint/last")
    with pytest.raises(InputError, match=r"^StorageWriter: give the step, or a checkpoint_id"):
        StorageWriter(tmp_path).set_up_storage_writer(True)
    with pytest.raises(InputError, match=r"^StorageWriter: use_collectives=False"):
        StorageWriter(tmp_path, 1).set_up_storage_writer(True, use_collectives=False)
