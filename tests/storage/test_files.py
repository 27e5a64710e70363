"""Files wherever they are: what a listing says of links, and of files that go away meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.checkpoint import save_checkpoint, verify
from shardwright.storage import files
from shardwright.training.published import copied
from tests.checkpoint.states import point, small_state


def test_a_link_has_the_size_of_what_it_links_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "to nothing").symlink_to("nothing")
    (tmp_path / "to itself").symlink_to("to itself")
    assert files.sizes_in(tmp_path) == {"file": 5, "link": 5, "to nothing": 0, "to itself": 0}


def test_what_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.sizes_in(tmp_path / "nothing")


def test_a_checkpoint_with_a_linked_file_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """As one whose data files are on another disk: with ``keep``, a damaged checkpoint does not count."""
    state = small_state()
    for step in (1, 2):
        directory = save_checkpoint(tmp_path / "run", point(step), state.infos, state.owned)
        (data,) = Path(str(directory)).glob("*.safetensors")
        os.rename(data, tmp_path / f"data-{step}")
        data.symlink_to(tmp_path / f"data-{step}")
    save_checkpoint(tmp_path / "run", point(3), state.infos, state.owned, keep=2)
    checked = verify(tmp_path / "run")
    assert (checked["ok"], [one["step"] for one in checked["checkpoints"]]) == (True, [3, 2])


def test_a_copy_of_nothing_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    def fail() -> None:
        with copied(tmp_path, tmp_path / "target", ()):
            raise RuntimeError

    (tmp_path / "target").mkdir()
    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "target").is_dir()
