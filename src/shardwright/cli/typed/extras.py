"""What is installed with an extra, said by name when it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.core.findings.errors import InputError


@contextmanager
def needing_extra(extra: str, what: str) -> Iterator[None]:
    """Around an import: a missing package becomes an InputError that names the extra. Our own modules must be there."""
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
