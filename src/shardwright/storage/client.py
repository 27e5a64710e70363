"""The client of an object store, from fsspec, and its errors as OSErrors with one reason that names no secret."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.storage.url import Url

NO_CREDENTIALS = (
    "there are no credentials for this store. Give them where its client reads them: for S3 in AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine"
)
NOT_ALLOWED = "the store refuses these credentials, or they may not do this: reading needs list and get, saving put and delete too"
NO_BUCKET = "there is no such bucket, or none that these credentials may see"
UNREACHABLE = "the store cannot be reached, or has dropped the connection"

REASONS = {
    "NoCredentialsError": NO_CREDENTIALS,
    "PartialCredentialsError": NO_CREDENTIALS,
    "CredentialRetrievalError": NO_CREDENTIALS,
    "DefaultCredentialsError": NO_CREDENTIALS,
    "ProfileNotFound": NO_CREDENTIALS,
    "HTTPClientError": UNREACHABLE,
    "ClientConnectionError": UNREACHABLE,
    "ClientPayloadError": UNREACHABLE,
    "IncompleteRead": UNREACHABLE,
    "ConnectionError": UNREACHABLE,
    "TimeoutError": UNREACHABLE,
}
"""Reasons by the name of a class that an error has: the libraries that define them are not imported here."""

BUCKET = re.compile(r"(bucket|container)\b.*\b(not exist|not found)|NoSuchBucket", re.IGNORECASE)
QUERY = re.compile(r"\?\S+")
MOST_CHARACTERS = 300


def connected(url: Url) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. A process has one client for each store.

    Raises InputError where a package is missing.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(
            f"{url}: a URL needs the package fsspec, which is not installed. Install it with: "
            f"pip install 'shardwright[remote]'"
        ) from None
    try:
        system, path = url_to_fs(url.text)
    except ImportError as error:
        text = str(error).rstrip(".")
        raise InputError(
            f"{url}: {url.scheme}:// needs a package that is not installed ({text}). For s3:// install: "
            f"pip install 'shardwright[remote]'"
        ) from None
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise OSError(errno.EIO, reason(error), str(url)) from error
        raise InputError(f"{url}: fsspec knows no store whose URLs begin with {url.scheme}://.") from None
    except Exception as error:
        raise OSError(errno.EIO, reason(error), str(url)) from error
    return system, path


def reconnect(url: Url) -> None:
    """The next request of this thread to this store goes through a new client, and so through a new connection."""
    system, _ = connected(url)
    # fsspec keeps a client for each thread, under this name.
    type(system)._cache.pop(system._fs_token, None)


@contextmanager
def as_os_errors(url: Url) -> Iterator[None]:
    """Turns every error of a store's client into an OSError with a reason, the URL, and the subclass that it had."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except FileNotFoundError as error:
        if BUCKET.search(str(error)):
            # No missing file: a checkpoint is not proven damaged by it.
            raise OSError(errno.EIO, NO_BUCKET, str(url)) from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(url)) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "there is such an object already", str(url)) from error
    except PermissionError as error:
        raise PermissionError(errno.EACCES, NOT_ALLOWED, str(url)) from error
    except Exception as error:
        raise OSError(errno.EIO, reason(error), str(url)) from error


def reason(error: BaseException) -> str:
    """Why a store's client has failed, in one line: of an unknown error its class and its first line without queries."""
    for one in (error, error.__cause__):
        for kind in type(one).__mro__ if one is not None else ():
            if kind.__name__ in REASONS:
                return REASONS[kind.__name__]
    known = error.strerror if isinstance(error, OSError) else None
    text = ((known or str(error)).strip().splitlines() or [""])[0].rstrip(".")
    return QUERY.sub("?...", f"{type(error).__name__}: {text}" if text else type(error).__name__)[:MOST_CHARACTERS]
