"""TOML to values. A text is held against the bounds of digits and levels before Python parses it: that takes memory by their square."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from shardwright.core.findings.bounds import BOUNDS
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.files.text import error_at, place_of

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DOTTED = re.compile(rf"(?<![\w\"'.-])(?:{_PART}[ \t]*+\.[ \t]*+){{{BOUNDS['levels'].most},}}+{_PART}")
_DIGITS = re.compile(rf"(?<![\w.\"'-])[0-9_]{{{BOUNDS['digits'].most + 1},}}+")


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises InputError, with the position, for one that is not TOML, and for one beyond the bounds.

    >>> parse_toml("[mesh]\\nfsdp = 8", "a.toml")
    {'mesh': {'fsdp': 8}}
    """
    for pattern, counted, noun in (
        (_DOTTED, "levels", "a key of {} parts"),
        (_DIGITS, "digits", "a number of {} digits"),
    ):
        beyond = pattern.search(text)
        if beyond is not None:
            number = beyond[0].count(".") + 1 if counted == "levels" else len(beyond[0].replace("_", ""))
            bound = BOUNDS[counted]
            message = f"{noun.format(f'{number:,}')}, where {bound.most:,} are the most. {bound.fix}"
            raise error_at(message, text, place_of(text, beyond.start(), source))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        message = re.sub(r" \(at .*\)", "", str(error))
        message = f"not TOML: {message[0].lower()}{message[1:]}."
        if place is None:
            raise InputError(f"{source}: {message}") from None
        raise error_at(message, text, Position(source=source, line=int(place[1]), column=int(place[2]))) from None
    except (RecursionError, MemoryError):
        raise InputError(f"{source}: not readable: the values are nested too deeply.") from None
    except ValueError as error:
        raise InputError(f"{source}: not TOML: {error}.") from None
