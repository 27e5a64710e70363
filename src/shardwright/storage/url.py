"""A folder or file of an object store, by its URL. It is taken apart and joined as a Path is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwright.core.findings.bounds import require_path
from shardwright.core.findings.errors import InputError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
LOCAL = ("file", "local")
COLLAPSED = re.compile(r"(s3|s3a|gs|gcs|abfs|abfss|az|adl|hdfs|oci|oss|memory|file):/(?!/)")
"""What a Path makes of a URL."""
NO_PORT = ("s3", "s3a", "gs", "gcs", "memory")
NO_USER = (*NO_PORT, "http", "https")
"""Schemes without a user before an ``@``: what is there is a key or a token."""
PASSWORD = re.compile(r"(?!arn:)[^/@:]*:.*@", re.DOTALL)
"""A user and a password, which may have slashes. Names of resources of AWS begin with ``arn:``."""
PORT = re.compile(r"[^/@:]*:\d{1,5}/")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, order=True)
class Url:
    """``text``: a scheme, ``://``, a bucket or host, and a path without a slash at its end. Made by ``parsed_place``.

    >>> step = Url("s3://bucket/run") / "checkpoints" / "step-00000010"
    >>> str(step), step.name, str(step.parent)
    ('s3://bucket/run/checkpoints/step-00000010', 'step-00000010', 's3://bucket/run/checkpoints')
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}")

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder above; that of a bucket is the bucket."""
        above = self.text.rpartition("/")[0]
        return self if above.endswith("/") else Url(above)


Place = Path | Url
"""Where a file or folder is."""


def local_path(place: Place) -> Path | None:
    """The path of a place on this machine; None of one in a store.

    >>> local_path(Path("run")), local_path(Url("s3://bucket/run"))
    (PosixPath('run'), None)
    """
    return None if isinstance(place, Url) else place


def parsed_place(place: str | os.PathLike[str] | Url) -> Place:
    """A local path, or a URL where the text has ``://``. ``file://`` is a local path.

    Raises InputError for a path that no file system holds, for a URL without a bucket, and for one with a password, a key or a query: their text would be shown and
    stored.

    >>> parsed_place("run"), parsed_place("file:///data/run"), parsed_place("s3://bucket/run/")
    (PosixPath('run'), PosixPath('/data/run'), Url(text='s3://bucket/run'))
    """
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    scheme, mark, rest = text.partition("://")
    if not mark:
        require_path(text)
        if (found := COLLAPSED.match(text)) and not Path(text).exists():
            raise InputError(
                f"{found.group()}...: a URL has two slashes after its scheme. In Python give it as a text, not as a Path."
            )
        return Path(text)
    scheme = scheme.lower()
    if not SCHEME.fullmatch(scheme):
        raise InputError(f"{scheme!r} is not the scheme of a URL. Give one as s3://bucket/folder, or a local path.")
    if scheme in LOCAL:
        if not rest.startswith("/"):
            raise InputError(f"{text}: the path of a file URL begins with a slash, as file:///data/run.")
        require_path(rest)
        return Path(rest)
    return Url(f"{scheme}://{_checked(scheme, rest)}")


def _checked(scheme: str, rest: str) -> str:
    """What follows the scheme, without slashes at its end. Raises InputError, with no secret in it."""
    is_port = scheme not in NO_PORT and PORT.match(rest)
    if (PASSWORD.match(rest) and not is_port) or (scheme in NO_USER and "@" in rest.partition("/")[0]):
        shown = re.split(r"[?#]", rest.rpartition("@")[2])[0]
        raise InputError(
            f"{scheme}://...@{shown}: this URL has a password or a key, which would be shown and stored. Give it "
            f"where the store's client reads it: in the environment, or in fsspec's configuration file."
        )
    if found := re.search(r"[?#]", rest):
        raise InputError(
            f"{scheme}://{rest[: found.start()]}: this URL has more after '{found.group()}', which would be shown and stored. "
            f"Give options of the store in the environment, or in fsspec's configuration file."
        )
    shown = f"{scheme}://{rest}"
    if CONTROL.search(rest):
        raise InputError(f"{shown!r}: a URL has no control characters.")
    if "::" in rest:
        raise InputError(f"{shown}: '::' joins several URLs, and one is needed here.")
    rest = rest.rstrip("/")
    if not rest or rest.startswith("/") or "//" in rest:
        raise InputError(f"{shown}: needed a bucket and a folder, as s3://bucket/folder.")
    if any(part in (".", "..") for part in rest.split("/")):
        raise InputError(f"{shown}: in a store '.' and '..' are no folders. Give the folder itself.")
    return rest
