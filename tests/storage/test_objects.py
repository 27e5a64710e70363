"""Objects of a store: what its client raises becomes an OSError with a reason, and an upload that fails leaves no object."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.storage import files, objects
from shardwright.storage.client import NO_BUCKET, NO_CREDENTIALS, NOT_ALLOWED, UNREACHABLE
from shardwright.storage.url import Url
from tests.storage.faulty import FaultyFileSystem, keys

FOLDER = Url("faulty://store/folder")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    FaultyFileSystem.store.clear()
    yield
    FaultyFileSystem.store.clear()


def named(name: str, base: type[Exception] = Exception) -> Exception:
    """An error of a library that is not installed, by the name of its class."""
    return type(name, (base,), {})("https://host/key?X-Amz-Signature=secret")


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (named("NoCredentialsError"), OSError, NO_CREDENTIALS),
        (named("EndpointConnectionError", ConnectionError), OSError, UNREACHABLE),
        (named("FSTimeoutError", TimeoutError), OSError, UNREACHABLE),
        (named("Sub", type("ClientPayloadError", (Exception,), {})), OSError, UNREACHABLE),
        (PermissionError("Access Denied"), PermissionError, NOT_ALLOWED),
        (FileNotFoundError("folder/key"), FileNotFoundError, "there is no such object"),
        (FileNotFoundError(2, "The specified bucket does not exist"), OSError, NO_BUCKET),
        (named("Unheard"), OSError, "Unheard: https://host/key?..."),
        (ValueError("line one\nline two"), OSError, "ValueError: line one"),
    ],
)
def test_errors_of_a_client(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type, why: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    objects.put(FOLDER / "key", b"data")
    monkeypatch.setattr(FaultyFileSystem, "cat_ranges", fail)
    with pytest.raises(OSError, match=re.escape(why)) as raised:
        objects.read(FOLDER / "key", 100)
    assert type(raised.value) is kind
    assert (raised.value.strerror, raised.value.filename) == (why, "faulty://store/folder/key")


def test_a_missing_bucket_is_not_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "The specified bucket does not exist")

    assert objects.entries(FOLDER) == ()
    monkeypatch.setattr(FaultyFileSystem, "ls", fail)
    with pytest.raises(OSError, match="there is no such bucket") as raised:
        objects.entries(FOLDER)
    assert not isinstance(raised.value, FileNotFoundError)


def test_lists() -> None:
    for name in ("b", "a", "sub/c", "sub/more/d"):
        objects.put(FOLDER / name, b"12345")
    objects.put(Url("faulty://store/folder-beside"), b"")
    assert [(one.name, one.is_folder) for one in objects.entries(FOLDER)] == [("a", False), ("b", False), ("sub", True)]
    assert [(one.name, one.num_bytes) for one in objects.entries_below(FOLDER)] == [
        (name, 5) for name in ("a", "b", "sub/c", "sub/more/d")
    ]
    assert all(one.modified is not None for one in objects.entries_below(FOLDER))
    assert (files.exists(FOLDER), files.is_file(FOLDER), files.exists(FOLDER / "c")) == (True, False, False)
    objects.remove([FOLDER / "a", FOLDER / "sub" / "c", FOLDER / "never"])
    assert keys() == ["store/folder-beside", "store/folder/b", "store/folder/sub/more/d"]


def test_ranges_are_those_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REQUEST_BYTES", 7)
    data = bytes(range(256))
    objects.put(FOLDER / "key", data)
    with files.open_regular(FOLDER / "key") as file:
        for start, length in ((0, 256), (3, 100), (250, 6), (13, 0), (0, 1)):
            target = memoryview(bytearray(length))
            file.seek(start)
            assert file.readinto(target) == length
            assert bytes(target) == data[start : start + length]
        # As a file: what follows the last read, and less at the end.
        file.seek(250)
        assert (file.read(4), file.read(4)) == (data[250:254], data[254:])
    assert objects.read(FOLDER / "key", 256) == data
    for most in (0, 7, 255):
        with pytest.raises(OSError, match=f"found 256 bytes, needed at most {most}"):
            objects.read(FOLDER / "key", most)


def test_a_range_past_the_end_has_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses such a range, and so the only one of an empty object."""
    read = FaultyFileSystem.cat_file

    def refuse(self: FaultyFileSystem, path: str, start: int, end: int) -> bytes:
        found = read(self, path, start, end)
        if not found:
            raise OSError(22, "The requested range is not satisfiable")
        return found

    monkeypatch.setattr(FaultyFileSystem, "cat_file", refuse)
    monkeypatch.setattr(objects, "REQUEST_BYTES", 4)
    for data in (b"", b"1234", b"123456"):
        objects.put(FOLDER / "key", data)
        assert objects.read(FOLDER / "key", 100) == data
        with files.open_regular(FOLDER / "key") as file:
            assert file.read(20) == data


@pytest.mark.parametrize("conditional", [True, False])
def test_a_new_object_replaces_none(monkeypatch: pytest.MonkeyPatch, conditional: bool) -> None:
    if not conditional:
        monkeypatch.setattr(
            FaultyFileSystem,
            "pipe_file",
            lambda self, path, value: (
                self.store.__setitem__(path, self.open(path, "wb")) or self.store[path].write(value)
            ),
        )
    objects.put_new(FOLDER / "key", b"first")
    with pytest.raises(FileExistsError):
        objects.put_new(FOLDER / "key", b"other")
    assert objects.read(FOLDER / "key", 100) == b"first"


def test_of_two_new_objects_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find none; the store decides."""
    monkeypatch.setattr(FaultyFileSystem, "exists", lambda *_: False)
    first = FaultyFileSystem.pipe_file

    def exclusive(self: FaultyFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create" and path in self.store:
            raise type("ClientError", (Exception,), {})("PreconditionFailed")
        first(self, path, value)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", exclusive)
    objects.put_new(FOLDER / "key", b"first")
    with pytest.raises(FileExistsError):
        objects.put_new(FOLDER / "key", b"other")
    assert objects.read(FOLDER / "key", 100) == b"first"


def test_an_upload_that_fails_leaves_no_object() -> None:
    with suppress(RuntimeError), objects.new_object(FOLDER / "key", 10) as write:
        write(b"12345")
        raise RuntimeError
    assert keys() == []
    with objects.new_object(FOLDER / "key", 10) as write:
        write(b"12345")
        write(memoryview(b"67890"))
    assert objects.read(FOLDER / "key", 100) == b"1234567890"


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="fsspec knows no store whose URLs begin with nothing://"):
        objects.entries(Url("nothing://bucket/run"))
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError) as raised:
        objects.entries(FOLDER)
    assert str(raised.value) == (
        "faulty://store/folder: a URL needs the package fsspec, which is not installed. Install it with: "
        "pip install 'shardwright[remote]'"
    )


def test_parts_of_an_upload_are_few_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes 10,000 parts of an object, and a box may have 512 GiB."""
    asked: list[int] = []
    opened = FaultyFileSystem.open

    def seen(self: FaultyFileSystem, path: str, mode: str = "rb", **kwargs: int) -> object:
        asked.append(kwargs["block_size"])
        return opened(self, path, mode)

    monkeypatch.setattr(FaultyFileSystem, "open", seen)
    for num_bytes in (1, 1 << 39):
        with objects.new_object(FOLDER / "key", num_bytes):
            pass
        assert num_bytes / asked[-1] < 10_000
    assert asked[0] == 16 << 20


def test_a_name_is_never_a_pattern() -> None:
    for name in ("run*", "run[12]", "run1", "run2"):
        objects.put(Url(f"faulty://store/{name}") / "key", b"")
    objects.remove(
        [Url("faulty://store/run*/key"), Url("faulty://store/run[12]/key"), Url("faulty://store/never*/key")]
    )
    assert keys() == ["store/run1/key", "store/run2/key"]


def test_a_conditional_write_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "CONFLICT_WAITS_S", (0, 0))
    write, answers = FaultyFileSystem.pipe_file, ["ConditionalRequestConflict", "ConditionalRequestConflict"]

    def busy(self: FaultyFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        if answers:
            raise OSError(16, answers.pop())
        write(self, path, value, mode)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", busy)
    objects.put_new(FOLDER / "key", b"first")
    assert objects.read(FOLDER / "key", 100) == b"first"
    answers += ["ConditionalRequestConflict"] * 3
    with pytest.raises(OSError, match="ConditionalRequestConflict"):
        objects.put_new(FOLDER / "other", b"first")
