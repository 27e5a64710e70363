"""Which checkpoints are kept, whatever is wrong with some of them; at least one is always intact."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shardwright.checkpoint import CheckpointError, Retention, latest, open_checkpoint, verify
from shardwright.checkpoint.folder import on_disk
from shardwright.checkpoint.folder.directory import committed, leftovers, set_aside
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.writing import retention
from shardwright.checkpoint.writing import save as save_module
from shardwright.core.findings.errors import InputError
from tests.checkpoint.editing import data_of, edit_manifest, flip, part_file
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


def test_rules_together_over_a_run_whose_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Retention(newest=2, every_steps=6, every_hours=1, best=1)
    minutes = {1: 0, 2: 20, 3: 70, 4: 130, 5: 10, 6: 30, 7: 75, 8: 140, 9: 145}
    for step, late in minutes.items():
        now = datetime(2026, 3, 1, 8, 0, tzinfo=UTC) + timedelta(minutes=late)
        monkeypatch.setattr(save_module, "now", lambda now=now: now)
        save(tmp_path, small_state(), step=step, keep=rules, metrics={"loss": 1.0 if step == 5 else 10.0 - step})
    # 9 and 8 are the newest, 6 is a multiple, 5 has the lowest loss; 1, 3 and 4 are the first of their hours.
    assert steps(tmp_path) == [9, 8, 6, 5, 4, 3, 1]
    found = open_checkpoint(tmp_path / "checkpoints/step-00000005").manifest
    assert (found.saved_at, found.keep) == (datetime(2026, 3, 1, 8, 10, tzinfo=UTC), rules)
    assert found.point.metrics == {"loss": 1.0}


def test_a_step_of_an_earlier_release_is_kept_by_a_rule_about_what_it_lacks(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, small_state(), step=step, metrics={"loss": float(step)})
    for step in (1, 2):
        edit_manifest(
            tmp_path / f"checkpoints/step-{step:08d}", lambda value: (value.pop("saved_at"), value.pop("metrics"))
        )
    save(tmp_path, small_state(), step=4, keep=Retention(best=1), metrics={"loss": 0.5})
    assert steps(tmp_path) == [4, 2, 1]
    save(tmp_path, small_state(), step=5, keep=Retention(every_hours=24))
    assert steps(tmp_path)[:1] == [5]
    assert steps(tmp_path)[-2:] == [2, 1]
    save(tmp_path, small_state(), step=6, keep=1)
    assert steps(tmp_path) == [6]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a data file is gone": lambda path: data_of(path).unlink(),
    "a data file is shorter": lambda path: os.truncate(data_of(path), 100),
    "a part is gone": lambda path: (path / part_file()).unlink(),
    "the index is longer": lambda path: os.truncate(path / "boxes.index", 10_000),
    "a bit of the manifest": lambda path: flip(path / "manifest.json", 200),
    "the manifest is a folder": lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),
    "another step's": lambda path: (shutil.rmtree(path), shutil.copytree(path.with_name("step-00000001"), path)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_to_the_newest_other_one_leaves_an_older_one(what: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, small_state(), step=step)
    DAMAGE[what](tmp_path / "checkpoints/step-00000003")
    save(tmp_path, small_state(), step=4, keep=2)
    assert steps(tmp_path) == [4, 3, 2]
    assert [item["ok"] for item in verify(tmp_path)["checkpoints"]] == [True, False, True]


def test_nothing_is_deleted_where_the_checkpoint_just_written_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, small_state(), step=1)
    durable = on_disk.make_durable

    def losing(directory: Path) -> None:
        durable(directory)
        if directory.name == "checkpoints":
            data_of(directory / "step-00000002").unlink()

    monkeypatch.setattr(on_disk, "make_durable", losing)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, small_state(), step=2, keep=1)
    assert str(caught.value).replace(str(tmp_path), "OUT") == (
        "OUT/checkpoints/step-00000002: files of it are missing or have another size just after they were written, so no older "
        "checkpoint was deleted. Look at this disk before the run goes on."
    )
    assert steps(tmp_path) == [2, 1]


def test_each_manifest_is_read_once_and_no_part_or_data_file_of_old_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = retention.read_manifest

    def counted(directory: Path) -> Manifest:
        read.append(directory.name)
        return original(directory)

    monkeypatch.setattr(retention, "read_manifest", counted)
    for step in range(1, 9):
        path = save(tmp_path, small_state(), step=step, keep=4)
        # Of the same size: whatever reads it finds that its digest does not match.
        part = path / part_file()
        part.write_bytes(bytes(part.stat().st_size))
    assert steps(tmp_path) == [8, 7, 6, 5]
    # Once for what it says, and once with the sizes of its files.
    assert max(map(read.count, read)) == 2


def test_what_was_set_aside_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, small_state(), step=step)
    aside = [set_aside(tmp_path / "checkpoints/step-00000003", "damaged")]
    aside += [set_aside(tmp_path / "checkpoints/step-00000004", "set-aside")]
    save(tmp_path, small_state(), step=5, keep=2)
    assert steps(tmp_path) == [5, 2]
    assert all(path.is_dir() for path in aside)


def test_a_deletion_that_is_killed_is_finished_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, small_state(), step=step)

    def killed(directory: Path) -> None:
        os.rename(directory, directory.with_name(f"{directory.name}.deleting-81d2e044"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, small_state(), step=4, keep=2)
    assert (steps(tmp_path), len(leftovers(tmp_path))) == ([4, 3, 2], 1)
    save(tmp_path, small_state(), step=5, keep=2)
    assert (steps(tmp_path), leftovers(tmp_path)) == ([5, 4], ())
