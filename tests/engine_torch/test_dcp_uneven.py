"""All of 1,024 uneven dims under tensor parallelism and FSDP, through the planners and the storage: none has wrong rows.

PyTorch names wrong rows for 71 of them: 39 cannot be saved, and 32 load wrong values (``test_reloading.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.checkpoint import open_newest
from tests.engine_torch.dcp_imagined import State, as_fsdp_says, held, load_all, save_all, states
from tests.matrix import some

SIZES = range(1, 65)
MESHES = [(tp, dp) for tp in (2, 3, 4, 8) for dp in (2, 3, 4, 8)]
NAMES = ("dp", "tp")


def state_of(tp: int, dp: int, *, empty: bool = False):
    """The state of a rank: one tensor of each size, whose rows are numbered or zero."""

    def make(mesh: DeviceMesh, rank: int) -> State:
        rows = {size: held(size, tp, dp, rank) for size in SIZES}
        return {
            f"rows {size}": as_fsdp_says(torch.zeros_like(one) if empty else one, mesh, size)
            for size, one in rows.items()
        }

    return make


@pytest.mark.parametrize("mesh", some(MESHES, [1, 6]), ids=lambda mesh: f"tp {mesh[0]} dp {mesh[1]}")
def test_every_size_is_saved_and_loaded_on_another_mesh(mesh: tuple[int, int], tmp_path: Path) -> None:
    (tp, dp), (other_tp, other_dp) = mesh, MESHES[(MESHES.index(mesh) + 5) % len(MESHES)]
    save_all(tmp_path, 1, states((dp, tp), NAMES, state_of(tp, dp)))
    checkpoint = open_newest(tmp_path)
    wrong = [size for size in SIZES if checkpoint.read_box(f"rows {size}").tolist() != list(range(size))]
    assert wrong == []
    loaded = states((other_dp, other_tp), NAMES, state_of(other_tp, other_dp, empty=True))
    load_all(tmp_path, loaded)
    wrong = [
        (size, rank)
        for rank, state in enumerate(loaded)
        for size in SIZES
        if state[f"rows {size}"].to_local().tolist() != held(size, other_tp, other_dp, rank).tolist()
    ]
    assert wrong == []


def test_what_pytorch_says_of_them() -> None:
    """Why these sizes: by DTensor's own arithmetic, 71 of the 1,024 name rows on a rank that it does not hold."""
    named = [
        (tp, dp, size)
        for tp, dp in MESHES
        for size in SIZES
        if _held(size, tp, dp) != _named_by_placements(size, tp, dp)
    ]
    assert len(named) == 71


def _chunks(rows: Sequence[int], number: int) -> list[Sequence[int]]:
    length = -(-len(rows) // number)
    return [rows[index * length : (index + 1) * length] for index in range(number)]


def _held(size: int, tp: int, dp: int) -> list[list[int]]:
    parts = [_chunks(range(size), tp)[within] for within in range(tp)]
    return [list(_chunks(parts[within], dp)[index]) for index in range(dp) for within in range(tp)]


def _named_by_placements(size: int, tp: int, dp: int) -> list[list[int]]:
    strided = [[row for part in _chunks(range(size), tp) for row in _chunks(part, dp)[index]] for index in range(dp)]
    return [list(_chunks(strided[index], tp)[within]) for index in range(dp) for within in range(tp)]
