"""JSON values with their path, so that an error names the file and the path to the wrong value from the root."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.storage.files import read_regular
from shardwright.storage.url import Place

MOST = (1 << 63) - 1
"""The largest number in a manifest: what 64 bits hold, as the counters of files, NumPy and the engines."""
MAX_JSON_BYTES = 1 << 30
"""The largest JSON file that is read: a manifest of some ten million processes."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a JSON file. ``label`` is its own name, ``parent`` the value that contains it."""

    value: Any
    file: Place
    label: str = ""
    parent: Field | None = None

    @property
    def place(self) -> str:
        """The path from the root, as in ``tensor 'w', boxes[3], start``."""
        above = self.parent.place if self.parent else ""
        return f"{above}, {self.label}" if above else self.label

    def error(self, message: str, code: str = "SW503") -> CheckpointError:
        """An error at this path."""
        place = self.place
        return CheckpointError(f"{self.file}: {place + ': ' if place else ''}{message}", code=code)

    def labelled(self, label: str) -> Field:
        """The same value with a more descriptive label than its index."""
        return Field(self.value, self.file, label, self.parent)

    def __getitem__(self, key: str) -> Field:
        mapping = self.mapping()
        if key not in mapping:
            raise self.error(f"the field '{key}' is missing.")
        return Field(mapping[key], self.file, key, self)

    def items(self) -> Iterator[Field]:
        """The members of a list."""
        if not isinstance(self.value, list):
            raise self._needed("a list")
        for number, item in enumerate(self.value):
            yield Field(item, self.file, f"{self.label}[{number}]", self.parent)

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self._needed("a mapping")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._needed("a text")
        return self.value

    def integer(self, minimum: int | None = 0) -> int:
        value = self.value
        if type(value) is not int or (minimum is not None and value < minimum):
            raise self._needed("a whole number" if minimum is None else f"a whole number, at least {minimum}")
        if abs(value) > MOST:
            raise self._needed(f"at most {MOST:,}")
        return value

    def number(self) -> float:
        if type(self.value) not in (int, float):
            raise self._needed("a number")
        try:
            return float(self.value)
        except OverflowError:
            raise self._needed("a number of 64 bits") from None

    def integers(self, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers, none below 0, and ``count`` of them if it is given."""
        value = self.value
        if (
            not isinstance(value, list)
            or any(type(item) is not int or item < 0 for item in value)
            or (count is not None and len(value) != count)
        ):
            number = "" if count is None else f"{count} "
            raise self._needed(f"a list of {number}whole numbers, at least 0 each")
        if max(value, default=0) > MOST:
            raise self._needed(f"at most {MOST:,} each")
        return tuple(value)

    def _needed(self, what: str) -> CheckpointError:
        found = json.dumps(self.value)
        return self.error(f"found {found if len(found) <= 60 else found[:57] + '...'}, needed {what}.")


def read_json(path: Place) -> Field:
    """The content of a JSON file. Raises OSError, also if it is too large, and CheckpointError if it is not JSON."""
    return parse_json(read_regular(path, MAX_JSON_BYTES), path)


def parse_json(data: bytes, path: Place) -> Field:
    """The value of a JSON text. Raises CheckpointError if it is not JSON, if a field is duplicated or a number is infinite."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: byte {error.start} is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not usable as JSON: {error}.") from error
    return Field(value, path)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the field '{duplicate}' appears twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text if len(text) <= 40 else text[:37] + '...'} is more than a number here can be")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
