"""Where a value is in a user's text, and values that keep that place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a text. Lines and columns count from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A value read from a file, with its place.

    ``value`` is a ``str``, ``int``, ``float``, ``bool``, ``None``, a tuple of ``Located`` (a sequence), or a
    mapping from ``str`` to ``Located``; ``key_positions`` gives the place of each key of a mapping.
    """

    value: str | int | float | bool | tuple[Located, ...] | Mapping[str, Located] | None
    position: Position
    key_positions: Mapping[str, Position] | None = None

    def key_position(self, key: str) -> Position:
        """The place of a mapping's key; that of the mapping if the key has none."""
        return (self.key_positions or {}).get(key, self.position)


def located(value: object, source: str = "<python>") -> Located:
    """Wrap plain Python values, so that a layout can be written as a dict in a program.

    >>> located({"mesh": {"fsdp": 8}}).value["mesh"].value["fsdp"].value
    8
    """
    here = Position(source=source, line=1, column=1)
    if isinstance(value, Mapping):
        return Located(
            value={str(key): located(item, source) for key, item in value.items()},
            position=here,
            key_positions={str(key): here for key in value},
        )
    if isinstance(value, (list, tuple)):
        return Located(value=tuple(located(item, source) for item in value), position=here)
    if value is None or isinstance(value, (str, int, float, bool)):
        return Located(value=value, position=here)
    raise TypeError(f"a layout holds text, numbers, lists and mappings; found {type(value).__name__}")


def caret(text: str, start: int, stop: int, indent: str = "    ") -> str:
    """``text`` with a caret line under ``text[start:stop]``.

    >>> print(caret("heads/tensor kv_heads/tensor", 13, 28))
        heads/tensor kv_heads/tensor
                     ^^^^^^^^^^^^^^^
    """
    return f"{indent}{text}\n{indent}{' ' * start}{'^' * max(1, stop - start)}"
