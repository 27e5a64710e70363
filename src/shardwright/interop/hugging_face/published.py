"""A published ``config.json`` as text and values, with the position of each key, and its numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from shardwright.core.findings.bounds import BOUNDS, number_text
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.core.layout.faults import shown
from shardwright.files.json_text import parse_json
from shardwright.files.text import error_at, place_of, read_text

LAYERS = ("num_hidden_layers", "first_k_dense_replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A config as text and values. ``text``: shown in errors."""

    source: str
    text: str
    values: Mapping[str, Any]

    def place(self, key: str) -> Position | None:
        """The position of a key; None where the file does not have it."""
        found = re.search(rf'"{re.escape(key)}"\s*:', self.text)
        return place_of(self.text, found.start(), self.source) if found else None

    def refuse(self, key: str, message: str) -> NoReturn:
        place = self.place(key)
        if place is None:
            raise InputError(f"{self.source}: {message}")
        raise error_at(message, self.text, place, len(key) + 2)

    def integer(self, key: str) -> int:
        value = self.values.get(key)
        if value is None:
            self.refuse(key, f"no '{key}', which a model of type '{self.values.get('model_type')}' needs.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(key, f"'{key}' is a whole number; found {shown(value)}.")
        bound = BOUNDS["layers" if key in LAYERS else "elements"]
        if value > bound.most:
            self.refuse(key, f"'{key}' is {number_text(value)}, and must be at most {bound.most:,}. {bound.fix}")
        return value

    def number(self, key: str, name: str = "", value: Any = None) -> float:
        """The number of a key; or ``value``, which is in the object of that key under ``name``."""
        name, value = name or f"'{key}'", self.values.get(key) if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(key, f"{name} is a number; found {shown(value)}.")
        try:
            number = float(value)
        except OverflowError:
            self.refuse(key, f"{name} is {number_text(value)}, which is more than a number of 64 bits can be.")
        if not isfinite(number):
            self.refuse(key, f"{name} is {number}, and must be finite.")
        return number

    def flag(self, key: str) -> bool:
        """True or false; null is false, as in the classes of transformers."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            self.refuse(key, f"'{key}' is true or false; found {shown(value)}.")
        return bool(value)


def read_config(path: str) -> Published:
    """A JSON object from a file. Raises InputError for any other content."""
    return parse_config(read_text(path), path)


def parse_config(text: str, path: str) -> Published:
    """The same of a text that came from ``path``. Python writes numbers that are not finite as ``Infinity`` and ``NaN``, and reads them."""
    parse_json(text, path, infinite=True)
    values = json.loads(text)
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: a configuration is a JSON object; this is {'a list' if isinstance(values, list) else shown(values)}."
        )
    return Published(source=path, text=text, values=values)


def is_config(published: Published) -> bool:
    """Whether it is a model's configuration, not only a plan."""
    return "model_type" in published.values
