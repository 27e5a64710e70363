"""An export that is killed, that another one meets, or that cannot write: nothing is overwritten, and what is left is removed."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwright.checkpoint import committed
from shardwright.checkpoint.folder.file_lock import acquire, release
from shardwright.core.findings.errors import InputError
from shardwright.interop.hugging_face.weights.exporting import WeightsExport, export_weights
from shardwright.interop.hugging_face.weights.importing import WeightsImport, import_weights
from tests.interop.published_folder import made_folder

ALL = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_folder(tmp_path_factory.mktemp("folders") / "folder", "llama3-test", {"num_layers": "1"}).path


@pytest.fixture
def out(folder: Path, tmp_path: Path) -> Path:
    import_weights(WeightsImport(folder=folder, out=tmp_path / "out"))
    return tmp_path / "out"


def export(out: Path) -> None:
    export_weights(WeightsExport(directory=out, to=out.parent / "back"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SLOW = """
import sys, time
from pathlib import Path
from shardwright.interop.hugging_face.weights import exporting
def copy(*_):
    print("writing", flush=True)
    time.sleep(600)
exporting._copy = copy
out = Path(sys.argv[1])
exporting.export_weights(exporting.WeightsExport(directory=out, to=out.parent / "back"))
"""


def test_a_live_one_is_met_and_a_killed_one_is_cleared_away(out: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        try:
            with pytest.raises(InputError) as error:
                export(out)
        finally:
            other.kill()
    assert str(error.value).startswith(f"--out {out.parent / 'back'}: process {other.pid} on ")
    assert str(error.value).endswith(" writes this folder. Wait until it ends, or give another folder.")
    left = names(out.parent)
    assert [name.partition("-")[0] for name in left] == ["back.writing", "back.writing", "out"]
    export(out)
    assert names(out.parent) == ["back", "out"]
    assert names(out.parent / "back") == ALL


def test_only_leftovers_of_this_folder_are_deleted(out: Path) -> None:
    others = ["back.writing-1", "back.writing-0123abcz", "other.writing-0123abcd", "xback.writing-0123abcd"]
    for name in [*others, "back.writing-0123abcd"]:
        (out.parent / name).mkdir()
    (out.parent / "back.writing-ffffffff").symlink_to(out)
    export(out)
    assert names(out.parent) == sorted(["back", "back.writing-ffffffff", "out", *others])
    assert committed(out)


def test_without_locks_the_file_must_be_deleted_by_hand(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.checkpoint.folder import new_folder
    from shardwright.checkpoint.folder.file_lock import LockHeldError

    def held(_: Path) -> int:
        raise LockHeldError("process 7 on node3", by_lock=False)

    monkeypatch.setattr(new_folder, "acquire", held)
    with pytest.raises(
        InputError, match=r"process 7 on node3 writes this folder\. If it does not exist any more, delete /"
    ):
        export(out)
    assert names(out.parent) == ["out"]


def test_the_lock_is_released_after_an_error(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.interop.hugging_face.weights import exporting

    def fails(*_: object) -> None:
        raise InputError("no")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_copy", fails)
        with pytest.raises(InputError, match="no"):
            export(out)
    assert names(out.parent) == ["out"]
    path = out.parent / "back.writing-lock"
    release(acquire(path))
    path.unlink()
    export(out)


def test_a_link_is_not_replaced(out: Path) -> None:
    (out.parent / "elsewhere").mkdir()
    (out.parent / "back").symlink_to(out.parent / "elsewhere")
    with pytest.raises(InputError, match=r"it is a link\. Give the folder that it points to"):
        export(out)
    assert names(out.parent) == ["back", "elsewhere", "out"]


def test_a_place_that_cannot_hold_a_folder(out: Path) -> None:
    (out.parent / "file").write_text("")
    with pytest.raises(InputError, match="the folder could not be written: Not a directory"):
        export_weights(WeightsExport(directory=out, to=out.parent / "file" / "back"))
    with pytest.raises(InputError, match="it exists already, and is never overwritten"):
        export_weights(WeightsExport(directory=out, to=out.parent / "file"))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_may_not_become_as_large(out: Path, folder: Path) -> None:
    with files_of_at_most(100_000), pytest.raises(InputError, match="could not be written: File too large"):
        export(out)
    assert names(out.parent) == ["out"]
    other = out.parent / "other"
    with files_of_at_most(100_000), pytest.raises(InputError, match="File too large"):
        import_weights(WeightsImport(folder=folder, out=other))
    assert committed(other) == ()
    assert not (other / "published").exists()
    import_weights(WeightsImport(folder=folder, out=other))


def test_an_import_through_links(folder: Path, tmp_path: Path) -> None:
    """As the cache of huggingface_hub has a model: every file is a link."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    found = import_weights(WeightsImport(folder=linked, out=tmp_path / "out"))
    assert found.files == ("generation_config.json",)
    assert not (tmp_path / "out" / "published" / "generation_config.json").is_symlink()
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"there is no model\.safetensors"):
        import_weights(WeightsImport(folder=linked, out=tmp_path / "other"))
