"""`ckpt import dcp` and `ckpt export dcp`, against PyTorch's own save and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.checkpoint import open_newest, verify
from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch import load
from shardwright.engine_torch.dcp_folder import export_folder, import_folder
from shardwright.engine_torch.dcp_folder.folder import open_folder
from shardwright.engine_torch.own_program.shards import raw_of
from shardwright.training.optimizer import FIRST
from tests.checkpoint.states import State, small_state
from tests.checkpoint.states import save as save_state
from tests.engine_torch.own_dcp import load_small as load_by_adapters
from tests.engine_torch.own_dcp_folder import load_plainly, plain_state, save_plainly
from tests.engine_torch.own_saved import load_small, numbered, save_small
from tests.engine_torch.ranks import Ranks, one_answer
from tests.matrix import rest

# PyTorch says that it saves and loads in one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Leaves by their paths."""
    if isinstance(state, dict):
        return {name: one for key, each in state.items() for name, one in flat(each, f"{path}.{key}").items()}
    if isinstance(state, list) and any(isinstance(each, dict) for each in state):
        return {name: one for key, each in enumerate(state) for name, one in flat(each, f"{path}.{key}").items()}
    return {path[1:]: state}


def loaded(folder: Path) -> dict[str, Any]:
    """Everything in a folder, as PyTorch's own conversion to one file reads it."""
    dcp_to_torch_save(folder, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=False)


def require_same(found: dict[str, Any], needed: dict[str, Any]) -> None:
    found, needed = flat(found), flat(needed)
    assert found.keys() == needed.keys()
    for name, value in needed.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert raw_of(found[name]).tobytes() == raw_of(value).tobytes(), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("seed", [0, rest(1), rest(2)])
def test_there_and_back(seed: int, tmp_path: Path) -> None:
    state = plain_state(seed)
    save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    imported = import_folder(tmp_path / "step-7", tmp_path / "out")
    assert imported["step"] == 7
    assert verify(tmp_path / "out")["ok"]
    checkpoint = open_newest(tmp_path / "out")
    tensors = {name: one for name, one in flat(state).items() if isinstance(one, torch.Tensor)}
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, one in tensors.items():
        assert checkpoint.read_box(name, raw=True).tobytes() == raw_of(one).tobytes(), name

    export_folder(tmp_path / "out", tmp_path / "back")
    exported = loaded(tmp_path / "back")
    assert json.loads(exported.pop("shardwright"))["version"] == 1
    assert exported.keys() == state.keys()
    require_same(exported, state)
    require_same(loaded(tmp_path / "step-7"), state)

    import_folder(tmp_path / "back", tmp_path / "again")
    again = open_newest(tmp_path / "again")
    assert (again.point, again.tensors) == (checkpoint.point, checkpoint.tensors)
    for name in again.tensors:
        assert again.read_box(name, raw=True).tobytes() == checkpoint.read_box(name, raw=True).tobytes(), name


SHARDINGS = [("fsdp-tp", (2, 2)), rest("fsdp", (4,)), rest("tp", (4,)), rest("fsdp-tp", (3, 2))]


@pytest.mark.parametrize(("kind", "sizes"), SHARDINGS)
def test_chunks_of_ranks_become_a_module(kind: str, sizes: tuple[int, ...], eight: Ranks, tmp_path: Path) -> None:
    """Saved by PyTorch with `get_state_dict`, imported, and loaded into a module and its optimizer on other ranks."""
    eight.first(int(np.prod(sizes))).run(save_plainly, kind, sizes, str(tmp_path / "step-1"))
    left_out = ["model.head.weight", "seen.*"]
    import_folder(tmp_path / "step-1", tmp_path / "out", module="model", optimizer="optim", leave_out=left_out)
    assert verify(tmp_path / "out")["ok"]
    assert one_answer(eight.first(4).run(load_small, "fsdp", (4,), str(tmp_path / "out"))) == []
    # As a state dict, for DCP's own calls with our storage.
    import_folder(tmp_path / "step-1", tmp_path / "state", leave_out=["seen.*"])
    assert one_answer(eight.first(4).run(load_by_adapters, "fsdp", (4,), str(tmp_path / "state"))) == ([], 8)


@pytest.mark.parametrize(("kind", "sizes"), SHARDINGS)
def test_pytorch_loads_an_exported_module(kind: str, sizes: tuple[int, ...], eight: Ranks, tmp_path: Path) -> None:
    eight.first(4).run(save_small, "fsdp", (4,), str(tmp_path / "out"))
    export_folder(tmp_path / "out", tmp_path / "to")
    ranks = eight.first(int(np.prod(sizes)))
    assert one_answer(ranks.run(load_plainly, kind, sizes, str(tmp_path / "to"))) == ([], 8)


class Trained:
    """Counters that DCP saves by their `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(9), "tokens": torch.tensor(512)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_a_state_dict_without_a_key_for_the_module(tmp_path: Path) -> None:
    """Weights at the top, a flattened optimizer with two groups, and what else a trainer saves."""
    module = numbered(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW([{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "weight_decay": 0.25}])
    for one in weights:
        one.grad = one.detach().clone()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, flat_state = get_state_dict(module, optimizer, options=options)
    others = {"train_state": Trained(), "lr_scheduler": {"last_epoch": 9}, "dataloader": {"dp_rank_0": b"pickled"}}
    save({**model, "optimizer": flat_state, **others}, checkpoint_id=tmp_path / "step-9", no_dist=True)
    with pytest.raises(InputError, match=r"'dataloader.dp_rank_0' is a builtins.bytes"):
        import_folder(tmp_path / "step-9", tmp_path / "out", module=".", optimizer="optimizer")
    import_folder(tmp_path / "step-9", tmp_path / "out", module=".", optimizer="optimizer", leave_out=["dataloader.*"])
    fresh = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    state = torch.optim.AdamW([{"params": list(fresh.parameters())[:1]}, {"params": list(fresh.parameters())[1:]}])
    loaded = load(tmp_path / "out", fresh, state)
    assert loaded.values == {"train_state": {"step": 9, "tokens": 512}, "lr_scheduler": {"last_epoch": 9}}
    assert [(group["lr"], group["weight_decay"]) for group in state.param_groups] == [(0.5, 0.01), (0.001, 0.25)]
    require_same(fresh.state_dict(), module.state_dict())
    for one, other in zip(fresh.parameters(), weights, strict=True):
        require_same(state.state[one], optimizer.state[other])


def test_a_trusted_pickle_is_read_alike(tmp_path: Path) -> None:
    """What is read as data, against Python's own unpickler."""
    save(plain_state(0), checkpoint_id=tmp_path, no_dist=True)
    found, needed = open_folder(tmp_path), open_folder(tmp_path, trusts=True)
    for field in ("tensors", "values", "other", "paths"):
        assert getattr(found, field) == getattr(needed, field)


def test_a_run_and_its_moments(tmp_path: Path) -> None:
    """Of a run of ours: other metadata, names with slashes, boxes of columns."""
    state = small_state()
    moments = State(
        arrays={**state.arrays, FIRST + "embed": state.arrays["embed"] + 1},
        boxes={**state.boxes, FIRST + "embed": state.boxes["embed"]},
    )
    save_state(tmp_path / "out", moments)
    export_folder(tmp_path / "out", tmp_path / "to")
    exported = loaded(tmp_path / "to")
    assert exported.keys() == {*moments.arrays, "shardwright"}
    for name, array in moments.arrays.items():
        assert raw_of(exported[name]).tobytes() == array.tobytes(), name
    import_folder(tmp_path / "to", tmp_path / "again")
    first, again = open_newest(tmp_path / "out"), open_newest(tmp_path / "again")
    assert (again.point, again.tensors) == (first.point, first.tensors)


def test_a_save_without_digests_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save({"w": torch.arange(6.0), "lr": 0.5}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert main(["ckpt", "import", "dcp", str(tmp_path / "step-1"), "--out", str(tmp_path / "out")]) == 0
    assert "unverified  w: saved without a digest\n" in capsys.readouterr().out
    np.testing.assert_array_equal(open_newest(tmp_path / "out").read_box("w"), np.arange(6.0))


def test_both_ways_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    state = {"model": {"w": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, "epoch": 2}
    save(state, checkpoint_id="step-5", no_dist=True)
    assert main(["ckpt", "import", "dcp", "step-5", "--out", "out", "--leave-out", "model.b"]) == 0
    assert capsys.readouterr().out == (
        "imported to out/checkpoints/step-00000005\n"
        "  from      step-5\n"
        "  as        state dict\n"
        "  tensors   1 tensor in 1 box, 48 B in float32\n"
        "  values    epoch\n"
        "  left out  model.b\n"
    )
    assert main(["ckpt", "export", "dcp", "out", "--out", "back"]) == 0
    assert capsys.readouterr().out == (
        "exported to back\n"
        "  from     out/checkpoints/step-00000005\n"
        "  step     5\n"
        "  tensors  1 tensor, 48 B in 1 file\n"
        "  values   epoch\n"
    )
    assert main(["ckpt", "import", "dcp", "back", "--out", "again", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["directory"], value["num_tensors"]) == ("again/checkpoints/step-00000005", 1)
