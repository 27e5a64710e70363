"""Texts of unknown origin, as they are printed: a terminal would act on their control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

ACTED_ON = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of the characters that move the cursor, end a line, change colours or directions, or cannot be encoded."""


def escaped(text: str) -> str:
    r"""A text in one line: each character that a terminal acts on is written as its escape.

    >>> escaped("w\x1b[2J\n"), escaped("embed/fsdp é")
    ('w\\x1b[2J\\n', 'embed/fsdp é')
    """
    if text.isprintable():
        return text
    return "".join(ascii(char)[1:-1] if unicodedata.category(char) in ACTED_ON else char for char in text)


def escaped_value(value: Any) -> Any:
    """A JSON value with every text in it escaped, keys too."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {escaped(key): escaped_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped_value(item) for item in value]
    return value
