"""The differences between two JSON values: every leaf that differs, whatever its name.

No field is listed here, so a field that is new in a plan or a lock is compared at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_THERE = "not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field that differs: its place, and both values as JSON."""

    where: str
    before: str
    now: str

    @property
    def text(self) -> str:
        return f"{self.where} is {self.now}, and was {self.before}"

    def to_json(self) -> dict[str, object]:
        return {"where": self.where, "before": self.before, "after": self.now}


def field_changes(before: Any, now: Any, where: str = "") -> tuple[FieldChange, ...]:
    """Every leaf that differs. Objects in a list are matched by their ``name``; without one, equal objects are left out first.

    >>> [change.text for change in field_changes({"a": [1, {"b": "x"}]}, {"a": [1, {"b": "y"}], "c": None})]
    ['a[1].b is "y", and was "x"', 'c is null, and was not there']
    """
    return tuple(_changes(before, now, where))


def _changes(before: Any, now: Any, where: str) -> Iterator[FieldChange]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            inside = f"{where}.{key}" if where else str(key)
            if key in before and key in now:
                yield from _changes(before[key], now[key], inside)
            else:
                sides = (_shown(side[key]) if key in side else NOT_THERE for side in (before, now))
                yield _change(inside, *sides)
    elif isinstance(before, list) and isinstance(now, list):
        yield from _list_changes(before, now, where)
    elif before != now or type(before) is not type(now):
        yield _change(where, _shown(before), _shown(now))


def _list_changes(before: Sequence[Any], now: Sequence[Any], where: str) -> Iterator[FieldChange]:
    rows = all(isinstance(row, Mapping) for row in (*before, *now))
    if rows and all("name" in row for row in (*before, *now)):
        first, second = ({row["name"]: row for row in side} for side in (before, now))
        yield from _changes(first, second, where)
        return
    if rows:
        # Their order does not matter: rows on both sides are removed.
        texts = [Counter(json.dumps(row, sort_keys=True) for row in side) for side in (before, now)]
        before, now = ([json.loads(text) for text in (texts[mine] - texts[1 - mine]).elements()] for mine in (0, 1))
    if len(before) != len(now):
        yield _change(where, _shown(before), _shown(now))
        return
    for number, pair in enumerate(zip(before, now, strict=True)):
        yield from _changes(*pair, f"{where}[{number}]")


def _change(where: str, before: str, now: str) -> FieldChange:
    return FieldChange(where=where, before=before, now=now)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
