"""The help of a verb, and the message for a command line that is no use of it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from shardwright.report.text.terminal import View


def usage_view(message: str) -> View:
    """A message, broken at spaces only."""
    return lambda _: Text(message)


def help_view(text_at: Callable[[int], str]) -> View:
    """A text that is laid out for a width."""
    return lambda width: Text(text_at(width), no_wrap=True)
