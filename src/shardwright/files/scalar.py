"""The value of an unquoted (plain) scalar in YAML.

YAML 1.1 reads ``on``, ``no`` and ``y`` as booleans, ``012`` as ten, ``12:30`` as 750, ``1_000`` as a thousand and
``1e-3`` as text. Names of axes and plain numbers must be kept as they are, so only this table applies. It is the core schema
of YAML 1.2 without its octal, hexadecimal, infinite and undefined numbers. Everything else is text.

| written | read as |
|---|---|
| nothing, ``~``, ``null``, ``Null``, ``NULL`` | None |
| ``true``, ``True``, ``TRUE``, ``false``, ``False``, ``FALSE`` | a boolean |
| ``0``, ``-7``, ``+12`` | an integer |
| ``1.5``, ``.5``, ``1e-3``, ``-2.E+8`` | a float |
"""

from __future__ import annotations

import math
import re

WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def plain_value(text: str) -> str | int | float | bool | None:
    """The value of a scalar written without quotes.

    >>> [plain_value(word) for word in ("true", "~", "8", "1e-3")]
    [True, None, 8, 0.001]
    >>> [plain_value(word) for word in ("on", "012", "1_000", "12:30", "0x10", ".inf", "2024-01-01")]
    ['on', '012', '1_000', '12:30', '0x10', '.inf', '2024-01-01']
    """
    if text in WORDS:
        return WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    match = _FLOAT.fullmatch(text)
    has_digits = match is not None and (match[1] is not None or len(match[2] or "") > 1)
    if has_digits and math.isfinite(number := float(text)):
        return number
    return text
