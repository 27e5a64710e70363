"""Tied weights: one tensor in a checkpoint of ours, and what of them another program has saved; and elements that share memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoint import open_newest
from shardwright.engine_torch import load, save
from tests.engine_torch.own_dcp import error_of, load_state, save_state
from tests.engine_torch.own_saved import cleared, message, run_of
from tests.engine_torch.test_own_saved_state import small


def test_a_tied_weight_is_one_tensor(tmp_path: Path) -> None:
    save(tmp_path, small(), step=1)
    assert "head.weight" not in open_newest(tmp_path).tensors
    untied = small()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    assert "'head.weight': missing" in message(load, tmp_path, untied)


def test_a_tied_weight_that_another_program_has_saved_under_both_names(tmp_path: Path) -> None:
    untied = small()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    save(tmp_path / "both", untied, step=1)
    tied: Any = cleared(small())
    load(tmp_path / "both", tied)
    assert torch.equal(tied.tokens.weight, untied.tokens.weight)
    with torch.no_grad():
        untied.head.weight[-1, -1] += 1
    save(tmp_path / "other", untied, step=1)
    assert message(load, tmp_path / "other", small()).endswith(
        "'tokens.weight' and 'head.weight' have other values, and are one tensor of this module. Load it into a module that does "
        "not tie them."
    )
    untied.head.weight = nn.Parameter(torch.zeros(3, 6))
    save(tmp_path / "shape", untied, step=1)
    assert "  'head.weight': float32 (3, 6), and 'tokens.weight' float32 " in message(load, tmp_path / "shape", small())
    # Or under the other one alone.
    alone = nn.Module()
    alone.head = run_of({"weight": torch.ones_like(tied.tokens.weight)})
    save(tmp_path / "head", alone, step=1)
    load(tmp_path / "head", tied, only=["tokens.weight"])
    assert (tied.tokens.weight == 1).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_a_tied_weight_by_any_of_its_names(tmp_path: Path) -> None:
    """Of a module that ``save`` saved, and of state dicts with one of the names, or both."""
    tied = small()
    needed = tied.tokens.weight.detach().clone()
    state = tied.state_dict()
    save(tmp_path / "module", tied, step=1)
    for name in ("tokens.weight", "head.weight"):
        one = {key: value for key, value in state.items() if key == name or value.shape != needed.shape}
        save_state(one, str(tmp_path / name))
    save_state(state, str(tmp_path / "both"))
    for folder in ("module", "tokens.weight", "head.weight", "both"):
        loaded: Any = cleared(small())
        load_state(loaded.state_dict(), str(tmp_path / folder))
        assert torch.equal(loaded.head.weight, needed), folder
    # Which of two values would be the module's?
    save_state({**state, "head.weight": needed + 1}, str(tmp_path / "other"))
    said, _ = error_of(load_state, small().state_dict(), str(tmp_path / "other"))
    assert "have other values, and are one tensor of this module." in said
    untied = {**small().state_dict(), "head.weight": torch.zeros_like(needed)}
    said, _ = error_of(load_state, untied, str(tmp_path / "module"))
    assert "'head.weight': missing" in said


def test_elements_that_share_memory_are_saved_and_not_loaded_into(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("row", torch.ones(1, 3).expand(4, 3))
    save(tmp_path, module, step=1)
    assert message(load, tmp_path, module) == (
        "'row': several of its elements are one place in memory, so it cannot be loaded into. Give the module a copy: tensor.clone()."
    )
    module.row = module.row.clone()
    load(tmp_path, module)
