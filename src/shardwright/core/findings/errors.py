"""Exceptions for errors that a user can correct.

ShardwrightError
├── InputError        a file, flag or value that cannot be read or used; exit code 2
│   └── NotationError a text that is not valid notation, with the place in it
└── FindingsError     a request that is readable and breaks a law; has findings; exit code 1
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Any

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import caret

INTERRUPTED, NOBODY_READS = 130, 141
"""Exit codes of a program that was interrupted, and of one whose output pipe is closed."""


class ShardwrightError(Exception):
    """Base of every error that a user can correct."""

    exit_code = 2


class InputError(ShardwrightError):
    """A file, a flag or a value that cannot be read or used."""


class NotationError(InputError):
    """A text that is not valid notation. ``text[start:stop]`` is the wrong part of it."""

    def __init__(self, message: str, *, text: str, start: int, stop: int) -> None:
        self.message, self.text, self.start, self.stop = message, text, start, stop
        super().__init__(f"{message}\n{caret(text, start, stop)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake_notation_error, (self.message, self.text, self.start, self.stop)


def _remake_notation_error(message: str, text: str, start: int, stop: int) -> NotationError:
    return NotationError(message, text=text, start=start, stop=stop)


class FindingsError(ShardwrightError):
    """A request that is readable and breaks a law; ``findings`` gives the law, the place and the fix."""

    exit_code = 1

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n\n".join(finding.text() for finding in self.findings))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.findings,)


UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF))
"""Error numbers of an open stream that cannot be written. An error about a file also has its name."""


def is_about_output(error: BaseException) -> bool:
    """Whether an error is about a standard stream that cannot be written."""
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program for an error; 1 for a fault of the program itself."""
    if isinstance(error, ShardwrightError):
        return error.exit_code
    if is_about_output(error):
        return ShardwrightError.exit_code
    return {KeyboardInterrupt: INTERRUPTED, BrokenPipeError: NOBODY_READS}.get(type(error), 1)


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise FindingsError with the findings of severity error, if there are any."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise FindingsError(errors)
