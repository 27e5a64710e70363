"""How many checkpoints are kept: the newest intact ones, at least one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwright.checkpoint import CheckpointError, latest, verify
from shardwright.checkpoint.directory import committed, leftovers
from shardwright.core.findings.errors import InputError
from tests.checkpoint.states import State, save, small_state


def steps(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in committed(out)]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none(tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError) as caught:
        save(tmp_path, small_state(), keep=keep)
    assert str(caught.value) == f"found {keep} checkpoints to keep, needed at least 1. Leave it out to keep all."
    assert steps(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    state: State = small_state()
    for step in (1, 2, 3, 4):
        save(tmp_path, state, step=step)
    save(tmp_path, state, step=5, keep=3)
    assert steps(tmp_path) == [5, 4, 3]
    save(tmp_path, state, step=6, keep=1)
    assert steps(tmp_path) == [6]


def test_what_was_just_written_is_kept_even_below_others(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        save(tmp_path, small_state(), step=step)
    save(tmp_path, small_state(), step=2, keep=2)
    assert steps(tmp_path) == [9, 8, 2]


def test_a_damaged_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, small_state(), step=step)
    (tmp_path / "checkpoints/step-00000003/manifest.json").write_text("{}")
    save(tmp_path, small_state(), step=4, keep=2)
    assert steps(tmp_path) == [4, 3, 2]
    found = latest(tmp_path).checkpoint
    assert found is not None
    assert found.point.step == 4


def test_an_old_one_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, small_state(), step=5)
    rename = os.rename

    def refusing(old: Path, new: Path) -> None:
        if ".deleting-" in str(new):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, small_state(), keep=1)
    assert str(caught.value).replace(str(tmp_path), "OUT") == (
        "OUT/checkpoints/step-00000010: the checkpoint is written, and the old one step-00000005 could not be deleted: Permission denied."
    )
    assert steps(tmp_path) == [10, 5]


def test_a_step_that_is_a_link_is_deleted_without_what_it_points_to(tmp_path: Path) -> None:
    """A checkpoint that somebody has moved to another disk, or taken from another run."""
    elsewhere = save(tmp_path / "other", small_state(), step=1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / elsewhere.name).symlink_to(elsewhere)
    for step in (2, 3, 4):
        save(tmp_path, small_state(), step=step, keep=2)
    assert steps(tmp_path) == [4, 3]
    assert leftovers(tmp_path) == ()
    assert verify(elsewhere)["ok"]


def test_a_link_that_a_killed_deletion_has_left_does_not_end_later_saves(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "other", small_state(), step=1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f"{elsewhere.name}.deleting-81d2e044").symlink_to(elsewhere)
    save(tmp_path, small_state(), step=2)
    assert (steps(tmp_path), leftovers(tmp_path)) == ([2], ())
    assert verify(elsewhere)["ok"]
