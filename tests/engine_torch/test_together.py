"""A load by four ranks: what several need is read once and passed on; all end where one cannot read or is gone."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import OwnedBox, TensorInfo, commit, open_checkpoint, saving, write_part
from shardwright.checkpoint.exchange.loads import load_of
from shardwright.checkpoint.exchange.wants import wants_of_plan
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.training.optimizer import FIRST, SECOND
from tests.checkpoint.editing import flip
from tests.checkpoint.states import point
from tests.engine_torch.ranks import RankError, Ranks
from tests.engine_torch.together import load_counted, load_failing, load_killed
from tests.matrix import some
from tests.storage.s3 import Server, put, run_using

SETTINGS = {"num_layers": "2", "embed": "48", "num_heads": "8", "num_kv_heads": "4", "mlp": "96", "vocab": "50"}
LARGE = 1 << 24
PIECE_BYTES = 1 << 12

LOADS = {
    # layout and mesh, bytes of a unit and of a round, most bytes read over bytes of the tensors
    "same": ("fsdp", {"fsdp": 4}, LARGE, LARGE, 1.0),
    "replicas": ("hsdp", {"data": 2, "fsdp": 2}, LARGE, LARGE, 1.0),
    "replicas in many rounds": ("hsdp", {"data": 4, "fsdp": 1}, 1 << 15, 1 << 13, 1.2),
    "columns": ("fsdp-tp", {"fsdp": 1, "tensor": 4}, LARGE, LARGE, 1.0),
    "columns in many rounds": ("fsdp-tp", {"fsdp": 2, "tensor": 2}, 1 << 15, 1 << 12, 1.2),
}


def plan_of(layout: str, sizes: dict[str, int], settings: dict[str, str] | None = None) -> Plan:
    plan = make_plan(
        Request(
            layout=load_layout(layout),
            table=build("llama3-test", SETTINGS if settings is None else settings),
            batch=8,
            length=64,
            mesh_sizes=sizes,
            engine="torch",
        )
    )
    assert not plan.errors
    return plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with moments in the boxes of four ranks of fsdp, and its arrays in a file of NumPy."""
    out, plan, rng = tmp_path_factory.mktemp("saved"), plan_of("fsdp", {"fsdp": 4}), np.random.default_rng(0)
    arrays = {
        prefix + weight.name: rng.standard_normal(
            (weight.num, *weight.shape) if weight.stack else weight.shape, np.float32
        )
        for prefix in ("", FIRST, SECOND)
        for weight in plan.request.table.weights
        if not (prefix and weight.frozen)
    }
    infos = [TensorInfo(name=name, shape=one.shape, dtype="float32") for name, one in arrays.items()]
    with saving(out, 10) as save:
        for device in range(4):
            owned = [
                OwnedBox(name=prefix + one.weight, box=one.box, array=arrays[prefix + one.weight][one.box.slices])
                for one in saved_boxes(plan, device)
                for prefix in ("", FIRST, SECOND)
                if one.saves and prefix + one.weight in arrays
            ]
            write_part(save, infos, owned, process=device, piece_bytes=PIECE_BYTES)
        directory = commit(save, point(), num_processes=4)
    np.savez(out / "arrays.npz", **arrays)  # pyright: ignore[reportArgumentType]
    return directory, out / "arrays.npz"


@pytest.mark.parametrize("case", some(list(LOADS), range(len(LOADS))))
def test_what_several_ranks_need_is_read_once(
    case: str, four: Ranks, saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, sizes, unit_bytes, round_bytes, most = LOADS[case]
    plan, (directory, arrays) = plan_of(layout, sizes), saved
    found = four.run(load_counted, plan, directory, arrays, unit_bytes, round_bytes)
    assert [one.wrong for one in found] == [()] * 4
    checkpoint = open_checkpoint(directory)
    weights = sum(prod(info.shape) * 4 for info in checkpoint.tensors.values())
    read = [one.bytes_read for one in found]
    assert weights <= sum(read) <= most * weights
    assert max(read) <= 1.5 * sum(read) / 4
    # What `ckpt show --for` says of each process is what it reads.
    monkeypatch.setattr("shardwright.checkpoint.exchange.units.UNIT_BYTES", unit_bytes)
    wants = wants_of_plan(plan, lambda device: device)
    load = load_of(checkpoint, {prefix + name: one for name, one in wants.items() for prefix in ("", FIRST, SECOND)}, 4)
    assert list(load.bytes_by_process) == read
    assert (load.bytes_passed_on == 0) == (case == "same")


@pytest.mark.matrix
def test_a_load_from_a_store_reads_once_too(four: Ranks, saved: tuple[Path, Path], s3: Server) -> None:
    plan, (directory, arrays) = plan_of("hsdp", {"data": 2, "fsdp": 1}), saved
    for path in directory.iterdir():
        put(f"together/checkpoints/{directory.name}/{path.name}", path.read_bytes())
    url = f"s3://bucket/together/checkpoints/{directory.name}"
    found = four.first(2).run(run_using, s3.environment, load_counted, plan, url, arrays, LARGE, LARGE)
    assert [one.wrong for one in found] == [()] * 2
    weights = sum(prod(info.shape) * 4 for info in open_checkpoint(url).tensors.values())
    read = [one.bytes_read for one in found]
    assert sum(read) == weights
    assert max(read) <= 0.75 * weights


def test_all_ranks_end_where_one_cannot_read(four: Ranks, saved: tuple[Path, Path]) -> None:
    plan = plan_of("hsdp", {"data": 4, "fsdp": 1})
    found = four.run(load_failing, plan, saved[0], 2)
    texts = [text for _, text in found]
    assert [kind for kind, _ in found] == ["CheckpointError"] * 4
    assert texts[2].startswith(f"{saved[0]}/boxes-")
    assert texts[2].endswith("cannot be read: Permission denied.")
    assert texts[0] == texts[1] == texts[3]
    assert texts[0].startswith(f"{saved[0]}: tensor '")
    assert f"rank 2 of 4 could not read its part, which others need too. Its error: {texts[2]}" in texts[0]


def test_damage_that_one_rank_finds_is_damage_to_all(four: Ranks, saved: tuple[Path, Path], tmp_path: Path) -> None:
    plan = plan_of("hsdp", {"data": 4, "fsdp": 1})
    directory = tmp_path / saved[0].name
    directory.mkdir()
    for path in saved[0].iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    file = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size - 100, 3)
    found: list[Any] = four.run(load_failing, plan, directory, -1)
    assert [kind for kind, _ in found] == ["DamagedError"] * 4
    assert len({text for _, text in found}) == 1
    assert found[0][1].startswith(f"{file}: tensor '")


def test_the_others_end_where_a_rank_is_gone(
    four: Ranks, saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine_torch.ranks.GRACE_S", 60.0)
    plan = plan_of("hsdp", {"data": 4, "fsdp": 1})
    with pytest.raises(RankError, match=r"^rank 1 of 4 ended with exit code 9$"):
        four.run(load_killed, plan, saved[0], 1, tmp_path)
    # A training run then names the process that is gone (``runs/processes``), as in a step.
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("023", "RuntimeError")
