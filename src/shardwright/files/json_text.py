"""JSON to values. Errors have a position; the values themselves have only the name of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Located, Position, located
from shardwright.files.text import error_at, read_text


def read_json(path: str | Path) -> Located:
    """The value of a JSON file. Raises InputError for a file that cannot be read or is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, source: str = "<text>", *, infinite: bool = False) -> Located:
    """The value of a JSON text.

    Raises InputError, with the position, for a text that is not JSON, and for what Python accepts beyond the standard
    or without a warning: a duplicate key, and ``NaN`` and ``Infinity`` unless they are ``infinite`` numbers here.

    >>> parse_json('{"mesh": {"fsdp": 8}}').value["mesh"].value["fsdp"].value
    8
    """
    if not text.strip():
        raise InputError(f"{source}: the file is empty; it should hold JSON.")

    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = [key for key, _ in pairs]
            duplicate = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{source}: '{duplicate}' appears twice in one object. Keep one.")
        return mapping

    def refuse_constant(name: str) -> NoReturn:
        raise InputError(f"{source}: {name} is not a JSON number. Write a finite number, or null.")

    try:
        value = json.loads(
            text, object_pairs_hook=without_duplicates, parse_constant=float if infinite else refuse_constant
        )
    except json.JSONDecodeError as error:
        position = Position(source=source, line=error.lineno, column=error.colno)
        problem = (error.msg[0].lower() + error.msg[1:]).removesuffix(" at")
        raise error_at(f"not JSON: {problem}.", text, position) from None
    except RecursionError:
        raise InputError(f"{source}: not readable: the values are nested too deeply.") from None
    except ValueError:
        raise InputError(f"{source}: not readable: an integer has more digits than Python converts.") from None
    return located(value, source)
