"""The error for a command line that is no use of its verb."""

from __future__ import annotations

from shardwright.core.findings.errors import InputError


class UsageError(InputError):
    """A command line that does not say what its verb needs. ``help`` is the command that prints what it may say."""

    def __init__(self, message: str, help: str) -> None:  # noqa: A002 - it is the help
        self.message, self.help = message, help
        super().__init__(f"{message}\nAll of its options: {help}")
