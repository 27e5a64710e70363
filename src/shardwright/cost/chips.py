"""Accelerators by name: what one device may use, and how many devices a slice of them has."""

from __future__ import annotations

import re
import tomllib
from math import prod
from pathlib import Path

from shardwright.core.errors import InputError
from shardwright.core.nearest import did_you_mean
from shardwright.core.request import Chip

TABLE = Path(__file__).parent / "chips.toml"
GIB = 1024**3

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*(\*[1-9][0-9]*)?")


def read_chips(text: str) -> tuple[Chip | None, int]:
    """The chip that ``KIND:SHAPE`` names and the number of its devices. ``cpu`` has devices and no limit of its own.

    ``*2`` behind a shape means two slices of it. Raises InputError for an unknown kind and for what is no shape.

    >>> chip, num_devices = read_chips("v5p:4x4x4*2")
    >>> chip.name, chip.usable_bytes // GIB, num_devices
    ('TPU v5p', 95, 128)
    """
    kind, colon, shape = text.partition(":")
    if not colon or not _SHAPE.fullmatch(shape):
        raise InputError(
            f"--chips: '{text}' does not say which chips and how many. Expected: KIND:SHAPE, as in v5p:4x4x4, "
            f"v5p:4x4x4*2 for two slices, h100:8x8 or cpu:8."
        )
    num_chips = prod(int(number) for number in re.split(r"[x*]", shape))
    if kind == "cpu":
        return None, num_chips
    rows = {row["kind"]: row for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["chip"]}
    if kind not in rows:
        raise InputError(f"--chips: no chip is called '{kind}'. {did_you_mean(kind, ['cpu', *rows])}")
    row = rows[kind]
    usable_bytes = row["usable_bytes"] if "usable_bytes" in row else int(row["usable_gib"] * GIB)
    chip = Chip(name=row["name"], usable_bytes=usable_bytes, source=row["source"])
    return chip, num_chips * row["devices_per_chip"]
