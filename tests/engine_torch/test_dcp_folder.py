"""`ckpt import dcp` and `ckpt export dcp`, against PyTorch's own save and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.checkpoint import open_newest, verify
from shardwright.cli.main import main
from shardwright.engine_torch.dcp_folder import export_folder, import_folder
from shardwright.engine_torch.dcp_folder.folder import open_folder
from shardwright.engine_torch.own_program.shards import raw_of
from tests.engine_torch.own_dcp import load_small as load_by_adapters
from tests.engine_torch.own_dcp_folder import load_plainly, plain_state, save_plainly
from tests.engine_torch.own_saved import load_small, save_small
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


def test_a_trusted_pickle_is_read_alike(tmp_path: Path) -> None:
    """What is read as data, against Python's own unpickler."""
    save(plain_state(0), checkpoint_id=tmp_path, no_dist=True)
    found, needed = open_folder(tmp_path), open_folder(tmp_path, trusts=True)
    for field in ("tensors", "values", "other", "paths"):
        assert getattr(found, field) == getattr(needed, field)


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
    assert main(["ckpt", "export", "dcp", "out", "--to", "back"]) == 0
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
