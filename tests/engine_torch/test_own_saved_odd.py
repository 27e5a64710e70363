"""Modules with odd names and tensors: they are loaded as they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardwright.checkpoint import open_newest
from shardwright.engine_torch import load, save
from shardwright.engine_torch.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from shardwright.engine_torch.dcp_folder.exporting import export_folder
from shardwright.engine_torch.dcp_folder.importing import import_folder
from shardwright.runs.own_program.values import differ


class Marked(nn.Module):
    """Its names look like the marks of values that JSON does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("$tuple", nn.Parameter(torch.ones(3)))
        self.register_parameter("tied", getattr(self, "$tuple"))
        self.add_module("$", Extra())


class Extra(nn.Module):
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def made(kept: Any) -> tuple[Any, torch.optim.Optimizer]:
    module: Any = Marked()
    getattr(module, "$").kept = kept
    optimizer = torch.optim.SGD([{"params": module.parameters(), "$momentum": 3}], lr=0.1, momentum=0.9)
    return module, optimizer


def test_names_may_look_like_marks_of_values(tmp_path: Path) -> None:
    module, optimizer = made({"$x": (1, 2)})
    module.tied.grad = torch.ones(3)
    optimizer.step()
    save(tmp_path / "ours", module, optimizer, step=1, values={"$values": 4})
    export_folder(tmp_path / "ours", tmp_path / "dcp-1")
    import_folder(tmp_path / "dcp-1", tmp_path / "again")
    for folder in ("ours", "again"):
        fresh, state = made(None)
        assert load(tmp_path / folder, fresh, state).values == {"$values": 4}
        assert getattr(fresh, "$").kept == {"$x": (1, 2)}
        assert torch.equal(fresh.tied, module.tied)
        assert state.param_groups[0]["$momentum"] == 3
        assert torch.equal(state.state[fresh.tied]["momentum_buffer"], torch.ones(3))


def test_such_names_in_a_state_dict(tmp_path: Path, single_rank: None) -> None:
    del single_rank
    state = {"$tuple": torch.ones(2), "$x": {"$": 3}, "$$y": "a text"}
    dcp_save(state, storage_writer=StorageWriter(tmp_path, step=1), planner=SavePlanner())
    found: dict[str, Any] = {"$tuple": torch.zeros(2), "$x": {"$": 0}, "$$y": ""}
    dcp_load(found, storage_reader=StorageReader(tmp_path), planner=LoadPlanner())
    assert torch.equal(found.pop("$tuple"), torch.ones(2))
    assert found == {"$x": {"$": 3}, "$$y": "a text"}
    export_folder(tmp_path, tmp_path / "dcp-1")
    import_folder(tmp_path / "dcp-1", tmp_path / "again")
    assert open_newest(tmp_path / "again").point.metadata["values"] == open_newest(tmp_path).point.metadata["values"]


def test_a_tied_scalar_has_one_value_under_both_names(tmp_path: Path, single_rank: None) -> None:
    del single_rank
    one, other = torch.tensor(1.5), torch.tensor(2.5)
    for step, state in ((1, {"a": one, "b": one}), (2, {"a": one, "b": other})):
        dcp_save(state, storage_writer=StorageWriter(tmp_path, step), planner=SavePlanner())
    tied = torch.zeros(())
    dcp_load({"a": tied, "b": tied}, storage_reader=StorageReader(tmp_path, 1), planner=LoadPlanner())
    assert tied == one
    with pytest.raises(CheckpointException, match="'a' and 'b' have other values, and are one tensor"):
        dcp_load({"a": tied, "b": tied}, storage_reader=StorageReader(tmp_path, 2), planner=LoadPlanner())


@pytest.mark.parametrize(
    "view", [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.conj()[1:].T], ids=["conj", "imag", "a part"]
)
def test_views_that_are_conjugated_when_they_are_read(view: Any, tmp_path: Path) -> None:
    module, values = nn.Module(), torch.randn(3, 4, dtype=torch.complex64)
    module.register_buffer("z", view(values))
    save(tmp_path, module, step=1)
    fresh: Any = nn.Module()
    fresh.register_buffer("z", view(torch.zeros_like(values)))
    load(tmp_path, fresh)
    assert torch.equal(fresh.z, view(values))


def test_values_of_other_types_are_other_values() -> None:
    assert [differ(1, other) for other in (1, True, 1.0)] == [False, True, True]
    assert differ({"$float": "nan"}, {"$float": "nan"}) is False
    assert differ(0.0, -0.0)
