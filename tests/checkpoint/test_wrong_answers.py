"""One wrong answer of a store proves nothing: what is intact is read again, and never deleted, renamed or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwright.checkpoint import CheckpointError, DamagedError, open_checkpoint, set_aside
from shardwright.checkpoint.folder.directory import committed
from shardwright.storage import asking, objects
from shardwright.storage.client import NOT_ALLOWED
from shardwright.storage.files import read_regular
from shardwright.storage.url import Url
from tests.checkpoint.states import random_state
from tests.checkpoint.stores import OUT, STATE, save_there, whole
from tests.storage.faulty import FaultyFileSystem, keys

FILES = ("manifest.json", "boxes.index", "part-00000.index", "boxes-00000-00000.safetensors")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    FaultyFileSystem.store.clear()
    yield
    FaultyFileSystem.store.clear()


@contextmanager
def answering(
    method: str, name: str, change: Callable[[Any], Any], first: int = 0, times: int = 1
) -> Iterator[list[int]]:
    """Requests number ``first`` and the next ones about an object of this name are answered by ``change``, of the right answer.

    Gives the numbers of those requests.
    """
    asked: list[int] = []
    right = getattr(FaultyFileSystem, method)

    def answer(self: FaultyFileSystem, path: str, *arguments: Any, **named: Any) -> Any:
        value = right(self, path, *arguments, **named)
        if name not in path:
            return value
        asked.append(len(asked))
        return change(value) if first <= asked[-1] < first + times else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyFileSystem, method, answer)
        yield asked


def missing(_: Any) -> Any:
    raise FileNotFoundError


def unavailable(_: Any) -> Any:
    raise OSError(5, "500 Internal Error")


def refused(_: Any) -> Any:
    raise PermissionError("Access Denied")


def page(_: bytes) -> bytes:
    return b"<html>log in first</html>"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def shortened(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize("change", [missing, unavailable, page, flipped, shortened], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", FILES)
def test_one_wrong_answer_to_a_read_is_followed_by_another(name: str, change: Callable[[Any], Any]) -> None:
    step = save_there(10)
    for number in range(4):
        with answering("cat_file", name, change, number):
            assert whole(step)


@pytest.mark.parametrize("name", FILES)
def test_an_object_that_is_damaged_is_proven_so(name: str) -> None:
    step = save_there(10)
    (path,) = [path for path in FaultyFileSystem.store if path.endswith(name)]
    kept = FaultyFileSystem.store[path].getvalue()
    FaultyFileSystem.store[path].seek(0)
    FaultyFileSystem.store[path].write(flipped(kept)[:-2] if name != FILES[-1] else flipped(kept))
    if name != FILES[-1]:
        FaultyFileSystem.store[path].truncate(len(kept) - 2)
    with pytest.raises(DamagedError):
        whole_or_raise(step)


def whole_or_raise(step: Url) -> None:
    checkpoint = open_checkpoint(step)
    for name in STATE.arrays:
        checkpoint.read_box(name)


def test_wrong_answers_that_differ_prove_nothing() -> None:
    step = save_there(10)
    answers = iter(range(100))
    with (
        answering("cat_file", "boxes.index", lambda data: bytes([next(answers)]) + data[1:], times=100),
        pytest.raises(CheckpointError) as raised,
    ):
        open_checkpoint(step)
    assert not isinstance(raised.value, DamagedError)
    assert str(raised.value).endswith(
        "It was read 4 times, and not always with the same result: so it may be intact. Nothing was changed. Try again later."
    )


def test_the_word_of_the_store_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache on the way that gives the same wrong bytes again and again; and one that has no object which the store lists."""
    step = save_there(10)
    monkeypatch.setattr(objects, "_md5", lambda row: "0" * 32 if row["name"].endswith("boxes.index") else None)
    with answering("cat_file", "boxes.index", flipped, times=100), pytest.raises(CheckpointError) as raised:
        open_checkpoint(step)
    assert not isinstance(raised.value, DamagedError)
    assert "the bytes that the store sends do not have the checksum that it gives" in str(raised.value)
    with answering("cat_file", "boxes.index", missing, times=100), pytest.raises(CheckpointError) as raised:
        open_checkpoint(step)
    assert not isinstance(raised.value, DamagedError)
    assert "the store says that it is there" in str(raised.value)


def test_what_a_store_refuses_is_asked_once() -> None:
    step = save_there(10)
    with answering("cat_file", "manifest.json", refused, times=100) as asked, pytest.raises(CheckpointError) as raised:
        open_checkpoint(step)
    assert (len(asked), NOT_ALLOWED in str(raised.value)) == (1, True)


def test_a_listing_without_the_newest_step_is_not_believed() -> None:
    older, newest = save_there(10), save_there(20)
    for number in range(3):
        with answering("ls", "run/checkpoints", lambda rows: [row for row in rows if "20" not in row["name"]], number):
            assert committed(OUT) == (newest, older)
        with answering("ls", "run/checkpoints", lambda _: [], number):
            assert committed(OUT) == (newest, older)
        with answering("info", "step-00000020/manifest.json", missing, number):
            assert committed(OUT) == (newest, older)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("cat_file", missing),
        ("cat_file", page),
        ("cat_file", lambda data: data.replace(b'"folder": "5', b'"folder": "6')),
        ("ls", lambda rows: [row for row in rows if "manifest.json" not in row["name"]]),
        ("ls", lambda _: []),
        ("info", missing),
    ],
)
def test_no_wrong_answer_deletes_the_files_of_a_step(method: str, change: Callable[[Any], Any]) -> None:
    """While the step is saved, and while the next save of its run looks for what killed ones have left."""
    for number in range(12):
        FaultyFileSystem.store.clear()
        with answering(method, "step-00000010", change, number):
            step = save_there(10)
        assert whole(step)
        objects.put(step / "5f0c9a17-deadbeef" / "declared-00000.json", b"[]")
        with answering(method, "step-00000010", change, number):
            save_there(20, random_state(1))
        assert whole(step)
    assert not any("deadbeef" in key for key in keys())


def test_no_wrong_answer_is_what_a_manifest_becomes() -> None:
    for number in range(6):
        FaultyFileSystem.store.clear()
        step = save_there(10)
        before = objects.read(step / "manifest.json", 1 << 20)
        with answering("cat_file", "manifest.json", page, number):
            aside = set_aside(step, "damaged")
        assert read_regular(aside, 1 << 20) == before


def test_a_save_that_is_complete_says_so_where_older_steps_cannot_be_listed() -> None:
    save_there(10)
    with answering("ls", "run/checkpoints", refused, 2, 100) as asked, pytest.raises(CheckpointError) as raised:
        save_there(20, random_state(1), keep=1)
    assert len(asked) == 3
    assert str(raised.value) == (
        "faulty://store/run/checkpoints/step-00000020: this checkpoint is complete, and what should follow failed: older ones "
        f"could not be looked for, and none was deleted. faulty://store/run/checkpoints: cannot be read: {NOT_ALLOWED}. "
        "Go on with --resume."
    )
    assert [step.name for step in committed(OUT)] == ["step-00000020", "step-00000010"]
    assert whole(OUT / "checkpoints" / "step-00000020", random_state(1))


def test_how_often_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(asking, "PAUSES_S", (0.3, 1.0, 3.0))
    monkeypatch.setattr("time.sleep", pauses.append)
    step = save_there(10)
    pauses.clear()
    with answering("cat_file", "boxes.index", unavailable, times=100) as asked, pytest.raises(CheckpointError):
        open_checkpoint(step)
    assert (len(asked), pauses) == (4, [0.3, 1.0, 3.0])
