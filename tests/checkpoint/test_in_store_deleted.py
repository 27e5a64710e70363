"""Checkpoints in an object store are set aside by their manifest, and deleted manifest first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.checkpoint import DamagedError, open_checkpoint, set_aside
from shardwright.checkpoint.folder.directory import committed, leftovers
from shardwright.checkpoint.folder.names import step_directory
from shardwright.storage import objects
from tests.checkpoint.states import random_state, save
from tests.checkpoint.stores import OUT, STATE, grow_old, last_request, save_there, whole
from tests.storage.faulty import FaultyFileSystem, Killed, keys


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    FaultyFileSystem.store.clear()
    yield
    FaultyFileSystem.store.clear()


def test_a_checkpoint_that_was_set_aside_is_kept_and_its_step_saved_again() -> None:
    first = random_state(1)
    step = save_there(10, first)
    aside = set_aside(step, "damaged")
    assert re.fullmatch(r"faulty://store/run/checkpoints/step-00000010/manifest.json.damaged-[0-9a-f]{8}", str(aside))
    assert committed(OUT) == ()
    grow_old(100)
    save_there(10)
    save_there(20)
    assert (leftovers(OUT), whole(step)) == ((), True)
    # Restored, as a person does.
    data = objects.read(step / aside.name, 1 << 20)
    objects.put(step / "manifest.json", data)
    assert whole(step, first)


@pytest.mark.parametrize("text", [b"{", b'{"folder": "../other"}', b"[]", b'{"folder": 1}'])
def test_a_damaged_manifest_may_name_any_folder(text: bytes) -> None:
    step = save_there(10)
    objects.put(step / "manifest.json", text)
    with pytest.raises(DamagedError):
        open_checkpoint(step)
    set_aside(step, "damaged")
    before = set(keys())
    grow_old(100)
    save_there(20)
    save_there(10)
    save_there(30)
    assert before <= set(keys())


def test_old_ones_are_deleted_manifest_first() -> None:
    for step in (10, 20):
        save_there(step)
    number = 0
    while True:
        with last_request(number) as made:
            try:
                save_there(30 + number, keep=1)
            except Killed:
                pass
            else:
                break
        del made
        for step in committed(OUT):
            assert whole(step)
        number += 1
    assert [step.name for step in committed(OUT)] == [f"step-000000{30 + number}"]
    assert leftovers(OUT) == ()


def test_a_copied_checkpoint_is_deleted_with_the_files_beside_its_manifest(tmp_path: Path) -> None:
    local = save(tmp_path, STATE, step=10)
    for path in local.iterdir():
        objects.put(step_directory(OUT, 10) / path.name, path.read_bytes())
    other = step_directory(OUT, 10) / "81d2e044-5f0c9a17" / "boxes-00000-00000.safetensors"
    objects.put(other, b"of a save that is running")
    save_there(20, keep=1)
    assert [key for key in keys() if "step-00000010" in key] == [str(other).removeprefix("faulty://")]
