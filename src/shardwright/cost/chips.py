"""Accelerators by name: their numbers, each with its source and date, and what other sources say instead."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.resolution.request import Chip

TABLE = Path(__file__).parent / "chips.toml"
GIB = 1024**3
CPU = "cpu"
"""A kind without numbers: simulated devices order layouts, they do not time them."""

Reading = Literal["used", "fastest", "slowest"]
"""Which of conflicting numbers is taken: the one that a plan uses, or that which makes a step fastest or slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cited:
    """A number, who says so and when."""

    value: float
    source: str
    date: str

    @property
    def text(self) -> str:
        return f"{self.source}, {self.date}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number that is used, with what other sources say instead."""

    used: Cited
    others: tuple[Cited, ...] = ()

    def read(self, reading: Reading) -> float:
        """The number used, or the largest or smallest of all."""
        values = [self.used.value, *(other.value for other in self.others)]
        return {"used": values[0], "fastest": max(values), "slowest": min(values)}[reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipNumbers:
    """One table of chips.toml. ``network`` is ``torus`` or ``switch``."""

    kind: str
    name: str
    network: str
    numbers: Mapping[str, Number]

    def read(self, name: str, reading: Reading = "used") -> float:
        """One number by its name. Raises KeyError where no source was checked for it."""
        return self.numbers[name].read(reading)

    def whole(self, name: str) -> int:
        """A number that counts."""
        return int(self.read(name))

    def most(self, name: str) -> float:
        """A number that limits; where none is given there is no limit."""
        return self.read(name) if name in self.numbers else inf

    @property
    def chip(self) -> Chip:
        """What the core needs to know: the memory that a program may have."""
        name = "usable_bytes" if "usable_bytes" in self.numbers else "usable_gib"
        usable = self.numbers[name].used
        size = usable.value if name == "usable_bytes" else usable.value * GIB
        return Chip(
            name=self.name,
            usable_bytes=int(size),
            source=f"{usable.source} {usable.date}",
            accelerator="TPU" if self.network == "torus" else "GPU",
        )


@cache
def chips() -> Mapping[str, ChipNumbers]:
    """Every chip by its kind, in the order of the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["chip"]
    return {row["kind"]: _chip(row) for row in rows}


def chip_of(kind: str) -> ChipNumbers:
    """The chip of a kind. Raises InputError, with the nearest kind there is.

    >>> chip_of("v5e").read("link_bytes_per_s"), chip_of("v5e").read("link_bytes_per_s", "fastest")
    (45000000000.0, 50000000000.0)
    """
    if kind not in chips():
        raise InputError(f"--chips: no chip is called '{kind}'. {did_you_mean(kind, [CPU, *chips()])}")
    return chips()[kind]


def _chip(row: Mapping[str, Any]) -> ChipNumbers:
    numbers = {name: value for name, value in row.items() if isinstance(value, Mapping)}
    return ChipNumbers(
        kind=row["kind"],
        name=row["name"],
        network=row["network"],
        numbers={
            name: Number(used=_cited(value), others=tuple(_cited(other) for other in value.get("others", ())))
            for name, value in numbers.items()
        },
    )


def _cited(value: Mapping[str, Any]) -> Cited:
    return Cited(value=value["value"], source=value["source"], date=value["date"])
