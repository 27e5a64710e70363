"""Objects of a store: listed, read by ranges, written as a stream, deleted. Errors are OSErrors.

What looks like a folder is the part of names before a slash: it is there as long as an object has it.
"""

from __future__ import annotations

import errno
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from shardwright.storage.client import as_os_errors, connected
from shardwright.storage.url import Url

REQUEST_BYTES = 4 << 20
"""Of one request for a range."""
PARALLEL_REQUESTS = 8
"""Requests at a time for the ranges of one read: a store answers one at some 50 MB/s."""
PART_BYTES = 16 << 20
"""Of one part of an upload, which is in memory."""
MOST_PARTS = 9_000
"""S3 takes 10,000."""
CONFLICT_WAITS_S = (0.2, 1.0, 3.0)
REFUSED = re.compile(r"PreconditionFailed|pre-conditions|conditionNotMet")
"""In the error of a conditional write that a store has refused because there is an object."""
MAGIC = re.compile(r"[*?\[]")
"""Characters for which a client would look for several names."""
MD5 = re.compile(r"[0-9a-f]{32}")
"""An ETag of S3 that is the checksum of the bytes: not that of an upload of several parts."""
MODIFIED = ("LastModified", "last_modified", "updated", "modified", "mtime", "created")
"""Where clients say when an object was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object or a folder by its name in the folder that was listed. ``modified`` and ``md5``, of its bytes, None: the store does
    not say."""

    name: str
    is_folder: bool
    num_bytes: int
    modified: datetime | None
    md5: str | None = None


def entries(folder: Url) -> tuple[Entry, ...]:
    """What is directly in a folder, by name; nothing where there is no such folder. Raises OSError."""
    return _listed(folder, lambda system, path: system.ls(path, detail=True))


def entries_below(folder: Url) -> tuple[Entry, ...]:
    """All objects of a folder and of the folders in it: their names have slashes. Raises OSError."""
    return _listed(folder, lambda system, path: list(system.find(path, detail=True).values()))


def entry(url: Url) -> Entry:
    """One object or folder. Raises OSError, FileNotFoundError where there is none."""
    system, path = connected(url)
    with as_os_errors(url):
        _forget(system)
        return _entry(system.info(path), url.name)


def read(url: Url, most_bytes: int) -> bytes:
    """All bytes of an object. Raises OSError, also for one of more than ``most_bytes``."""
    data = bytearray()
    with ObjectFile(url) as file:
        # A range, whose size is known before: without it, a client asks for the size, and reads whatever it is.
        while more := file.read(min(REQUEST_BYTES, most_bytes + 1 - len(data))):
            data += more
            if len(data) > most_bytes:
                raise OSError(
                    errno.EFBIG, f"found {entry(url).num_bytes:,} bytes, needed at most {most_bytes:,}", str(url)
                )
            if len(more) < REQUEST_BYTES:
                break
    return bytes(data)


def put(url: Url, data: bytes) -> None:
    """Write an object; one of its name is replaced. It appears complete. Raises OSError."""
    system, path = connected(url)
    with as_os_errors(url):
        system.pipe_file(path, data)


def put_new(url: Url, data: bytes) -> None:
    """Write an object unless there is one. Raises FileExistsError, OSError.

    A store with conditional writes refuses the second of two that come at the same time. On any other, both may succeed.
    """
    system, path = connected(url)
    with as_os_errors(url):
        _forget(system)
        if system.exists(path):
            raise FileExistsError
        for wait_s in (*CONFLICT_WAITS_S, None):
            try:
                system.pipe_file(path, data, mode="create")
                return
            except (TypeError, NotImplementedError):
                # A client that knows no conditional write: what was checked above is all there is.
                system.pipe_file(path, data)
                return
            except Exception as error:
                if REFUSED.search(f"{error} {error.__cause__}"):
                    raise FileExistsError from error
                if wait_s is None or "ConditionalRequestConflict" not in f"{error} {error.__cause__}":
                    raise
                # Another conditional write of this object is under way.
                time.sleep(wait_s)


@contextmanager
def new_object(url: Url, num_bytes: int) -> Iterator[Callable[[Any], object]]:
    """A function that writes the next bytes of a new object. ``num_bytes``: of all of it.

    The object appears when the block ends without an error. About two parts of the upload are in memory. Raises OSError.
    """
    system, path = connected(url)
    with as_os_errors(url):
        file = system.open(path, "wb", block_size=max(PART_BYTES, -(-num_bytes // MOST_PARTS)))

    def write(data: Any) -> object:
        with as_os_errors(url):
            return file.write(data)

    try:
        yield write
        with as_os_errors(url):
            file.close()
    except BaseException:
        # Closing would complete the object. What a store has of an upload that was not ended it never shows.
        with suppress(Exception):
            file.discard()
        file.closed = True
        raise


def remove(urls: Sequence[Url]) -> None:
    """Delete objects of one store. One that is not there is deleted. Raises OSError."""
    if not urls:
        return
    system, _ = connected(urls[0])
    with as_os_errors(urls[0]):
        paths = [connected(url)[1] for url in urls]
        singly = [path for path in paths if MAGIC.search(path)]
        together = [path for path in paths if not MAGIC.search(path)]
        try:
            if together:
                system.rm(together)
        except FileNotFoundError:
            singly = paths
        for path in singly:
            with suppress(FileNotFoundError):
                system.rm_file(path)
        _forget(system)


class ObjectFile:
    """An object opened for reading, as an unbuffered file. Reads past its end return less. Raises OSError."""

    def __init__(self, url: Url) -> None:
        self._url, self._at = url, 0
        connected(url)

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to close: each read is a request of its own."""

    def seek(self, offset: int) -> None:
        self._at = offset

    def read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        return bytes(data[: self.readinto(memoryview(data))])

    def readinto(self, target: memoryview) -> int:
        """Fill ``target`` by several requests at a time, and return the number of its bytes that were read."""
        done, start = 0, self._at
        # Not kept since it was opened: what is asked for again is asked through another connection.
        system, path = connected(self._url)
        while done < len(target):
            low = start + done
            high = min(start + len(target), low + PARALLEL_REQUESTS * REQUEST_BYTES)
            starts = list(range(low, high, REQUEST_BYTES))
            ends = [min(one + REQUEST_BYTES, high) for one in starts]
            with as_os_errors(self._url):
                found = system.cat_ranges([path] * len(starts), starts, ends, on_error="return")
                chunks = [_chunk(one) for one in found]
            for first, end, chunk in zip(starts, ends, chunks, strict=True):
                if len(chunk) > end - first:
                    raise OSError(
                        errno.EIO, f"found {len(chunk):,} bytes in a range of {end - first:,}", str(self._url)
                    )
                target[first - start : first - start + len(chunk)] = chunk
                done += len(chunk)
                if len(chunk) < end - first:
                    self._at = start + done
                    return done
        self._at = start + done
        return done


def _listed(folder: Url, list_rows: Callable[[Any, str], Sequence[dict[str, Any]]]) -> tuple[Entry, ...]:
    system, path = connected(folder)
    path = path.rstrip("/")
    try:
        with as_os_errors(folder):
            _forget(system)
            rows = list_rows(system, path)
    except FileNotFoundError:
        return ()
    # Of an object with this name, and of the empty objects that some tools make for folders, the name is the folder's own.
    found = [(row["name"].rstrip("/"), row) for row in rows]
    inside = [(name[len(path) + 1 :], row) for name, row in found if name.startswith(f"{path}/")]
    return tuple(sorted((_entry(row, name) for name, row in inside), key=lambda one: one.name))


def _entry(row: dict[str, Any], name: str) -> Entry:
    return Entry(
        name=name,
        is_folder=row["type"] == "directory",
        num_bytes=int(row.get("size") or 0),
        modified=next((at for key in MODIFIED if (at := _time(row.get(key))) is not None), None),
        md5=_md5(row),
    )


def _md5(row: dict[str, Any]) -> str | None:
    """The checksum that the client of S3 has as the ETag, and that of Google's store in base64."""
    with suppress(ValueError):
        of_google = row.get("md5Hash")
        tag = b64decode(of_google).hex() if of_google else str(row.get("ETag") or "").strip('"')
        return tag if MD5.fullmatch(tag) else None
    return None


def _time(value: Any) -> datetime | None:
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(found, datetime):
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        pass
    return None


def _chunk(found: Any) -> bytes:
    """The bytes of a range; none of one that begins at the end of its object or later, which stores refuse."""
    if not isinstance(found, BaseException):
        return found
    if "not satisfiable" in str(found) or "InvalidRange" in str(found):
        return b""
    raise found


def _forget(system: Any) -> None:
    """What a client remembers of listings: other processes write to the same folders."""
    system.invalidate_cache()
