"""The largest numbers that are accepted, as data: a typing error is refused at once, with both numbers.

Each bound is far above any trained model, and below what a plan's arithmetic or an engine's counters hold. To allow
more, raise the number here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from shardwright.core.findings.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """``most``: the largest number that is accepted. ``fix``: what to do about a larger one."""

    most: int
    fix: str


DEAREST_HOUR = 1e6
"""The highest price of a device for an hour, in any currency."""

SHOWN_CHARACTERS = 60
"""Of a path that is too long."""

BOUNDS: Mapping[str, Bound] = {
    "devices": Bound(most=1 << 20, fix="Give fewer devices."),
    "axes": Bound(most=32, fix="Give fewer axes: those of one role can be one axis."),
    "processes": Bound(most=1 << 20, fix="Give fewer processes."),
    "rows": Bound(most=1 << 24, fix="Give fewer rows."),
    "tokens": Bound(most=1 << 27, fix="Give shorter rows."),
    "microbatches": Bound(most=1 << 24, fix="Give fewer microbatches."),
    "chunks": Bound(most=1 << 24, fix="Give fewer chunks."),
    "training tokens": Bound(most=10**18, fix="Give fewer tokens."),
    "layers": Bound(most=1 << 14, fix="Give fewer layers."),
    "elements": Bound(most=1 << 32, fix="Give a smaller dim."),
    # An optimizer counts its steps in 32 bits.
    "steps": Bound(most=1_000_000_000, fix="Give fewer steps."),
    "checkpoints": Bound(most=1_000_000_000, fix="Leave it out: all checkpoints are then kept."),
    # Beyond these no float32 of a step is finite.
    "rate": Bound(most=1_000_000, fix="Give a lower rate."),
    "norm": Bound(most=10**18, fix="Give a smaller norm: nothing is clipped at this one."),
    "hours": Bound(most=1_000_000, fix="Give fewer hours."),
    "seconds": Bound(most=1_000_000, fix="Give a shorter time."),
    # Of a text before it is parsed: Python converts no integer of more digits, and its parsers take memory by the square of the levels.
    "digits": Bound(most=1_000, fix="Write a smaller number."),
    "levels": Bound(most=100, fix="Nest fewer tables."),
    # The largest published models have some 200,000.
    "tensors": Bound(most=1 << 19, fix="Fetch the file again, or divide the model."),
    # What file systems hold, in bytes.
    "name of a file": Bound(most=255, fix="Give a shorter name."),
    "path": Bound(most=4095, fix="Give a shorter path."),
}
"""Bounds by the quantity that is counted."""


def within(where: str, value: float, counted: str) -> None:
    """Raises InputError for a number above its bound. ``counted``: a key of ``BOUNDS``."""
    bound = BOUNDS[counted]
    if value > bound.most:
        raise InputError(f"{where} is {number_text(value)}, and must be at most {bound.most:,}. {bound.fix}")


def is_file_name(name: str) -> bool:
    """Whether a file may have this name, which was read from another file: a short one, of one part, without control characters.

    >>> is_file_name("model-00001.safetensors"), is_file_name("../model"), is_file_name("model" + chr(0)), is_file_name("x" * 300)
    (True, False, False, False)
    """
    num_bytes = len(name.encode(errors="replace"))
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and num_bytes <= BOUNDS["name of a file"].most
    )


def require_path(text: str) -> None:
    """Raises InputError for a path that no file system holds."""
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    if "\0" in text:
        raise InputError(f"{shown!r}: a path may have no NUL character. Leave it out.")
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    within(f"the path {shown!r}: its longest name, in bytes,", longest, "name of a file")
    within(f"the path {shown!r}: its number of bytes", len(os.fsencode(text)), "path")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an integer or a float; True and False are not."""
    return is_integer(value) or isinstance(value, float)


def shown_number(value: object) -> str:
    """A value as an error message shows it where a number is needed."""
    return number_text(value) if is_integer(value) else repr(value)


def integer_of(text: str) -> int:
    """The integer that a text gives; one too long for Python to parse gives 10^100, which is above every bound.

    Raises ValueError for a text that is not an integer.

    >>> integer_of("-12"), integer_of("9" * 5000) == 10**100
    (-12, True)
    """
    digits = text.strip().lstrip("+-")
    if len(digits) > 100 and digits.isdecimal():
        return -(10**100) if text.strip().startswith("-") else 10**100
    return int(text)


def number_text(value: float) -> str:
    """A number for a message, of any size; Python formats no integer of more than 4,300 digits.

    >>> number_text(30_000_000_000), number_text(-(10**5000)), number_text(2.5)
    ('30,000,000,000', 'below -10^20', '2.5')
    """
    if isinstance(value, float):
        return f"{value:g}"
    if abs(value) < 10**20:
        return f"{value:,}"
    return "above 10^20" if value > 0 else "below -10^20"
