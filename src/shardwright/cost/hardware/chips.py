"""Accelerators by name: their numbers, each with its source and date, and the numbers of other sources."""

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
from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.resolution.request import Chip

TABLE = Path(__file__).parent / "chips.toml"
MEASURED = Path(__file__).parent / "measured.toml"
GIB = 1024**3
REFUSED = {
    "trn2": "Trainium2 has 667 TF/s of bfloat16 and 96 GiB by its page; its rates out of a chip, what its runtime lets a program use, and "
    "what kernels reach were not checked",
}
"""Kinds that the table lacks for a reason."""
CPU = "cpu"
"""A kind without numbers: simulated devices have no times."""

Reading = Literal["used", "fastest", "slowest"]
"""Which of several conflicting numbers to read: the one that a plan uses, or the one with the fastest or slowest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cited:
    """A number with its source and date."""

    value: float
    source: str
    date: str

    @property
    def text(self) -> str:
        return f"{self.source}, {self.date}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The number that is used, and the numbers of other sources."""

    used: Cited
    others: tuple[Cited, ...] = ()

    def read(self, reading: Reading) -> float:
        """The number that is used, or the largest or smallest of all sources."""
        if reading == "used" or not self.others:
            return self.used.value
        values = [self.used.value, *(other.value for other in self.others)]
        return max(values) if reading == "fastest" else min(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipNumbers(HashedOnce):
    """A chip's tables of chips.toml and measured.toml. ``network``: ``torus`` or ``switch``. ``program``: ``eager``, ``compiled`` or ``fused``, and
    ``overlap``: roles whose collectives run inside of products, where a file of the user's says so (``user.py``). ``graphs``: parts of a layer
    whose kernels a host starts at once, and ``tokens_once``: a token is sent once to each device that has an expert of it."""

    kind: str
    name: str
    network: str
    numbers: Mapping[str, Number]
    program: str | None = None
    overlap: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    tokens_once: bool = False

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.kind, self.name, self.network)

    def read(self, name: str, reading: Reading = "used") -> float:
        """A number by its name. Raises KeyError if no source was checked for it."""
        return self.numbers[name].read(reading)

    def integer(self, name: str) -> int:
        """A number that is an integer."""
        return int(self.read(name))

    def limit(self, name: str) -> float:
        """A limit; infinite if the table has none."""
        return self.read(name) if name in self.numbers else inf

    def kernels_share(self, reading: Reading = "used") -> float:
        """What a whole step reaches of the rates of its kernels."""
        return self.read("kernels_share", reading) if "kernels_share" in self.numbers else 1.0

    @property
    def step_latency_s(self) -> float:
        """What a step takes besides its kernels and collectives, where that was measured (``calibration.py``)."""
        return self.read("step_latency_s") if "step_latency_s" in self.numbers else 0.0

    @property
    def chip(self) -> Chip:
        """What the core needs: the memory that a program may use, and which products the chip has."""
        name = "usable_bytes" if "usable_bytes" in self.numbers else "usable_gib"
        usable = self.numbers[name].used
        major, _, minor = str(
            self.read("compute_capability") if "compute_capability" in self.numbers else 0.0
        ).partition(".")
        size = usable.value if name == "usable_bytes" else usable.value * GIB
        return Chip(
            name=self.name,
            usable_bytes=int(size),
            source=f"{usable.source} {usable.date}",
            accelerator="TPU" if self.network == "torus" else "GPU",
            capability=(int(major), int(minor)),
        )


@cache
def chips() -> Mapping[str, ChipNumbers]:
    """Every chip by its kind, in the order of the table."""
    measured = {row["kind"]: row for row in _rows(MEASURED)}
    return {row["kind"]: _chip({**measured.get(row["kind"], {}), **row}) for row in _rows(TABLE)}


def _rows(table: Path) -> list[Mapping[str, Any]]:
    return tomllib.loads(table.read_text(encoding="utf-8"))["chip"]


def chip_of(kind: str) -> ChipNumbers:
    """The chip of a kind. Raises InputError with the nearest kind if it is unknown.

    >>> chip_of("v5e").read("link_bytes_per_s"), chip_of("v5e").read("link_bytes_per_s", "fastest")
    (45000000000.0, 50000000000.0)
    """
    if kind in REFUSED:
        raise InputError(
            f"--chips: '{kind}' has no numbers here: {REFUSED[kind]}. Give your own: {kind}:SHAPE+FILE (docs/cost.md)."
        )
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
