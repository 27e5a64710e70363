"""The error for a package that is not installed, with the name of the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.core.findings.errors import InputError


@contextmanager
def needing_extra(extra: str, what: str) -> Iterator[None]:
    """Turns a missing package in an import into an InputError that names the extra. A missing module of ours is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "shardwright"):
            raise
        raise InputError(
            f"{what} needs the package '{name}', which is not installed. Install it with: "
            f"pip install 'shardwright[{extra}]'"
        ) from None
