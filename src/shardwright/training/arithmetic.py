"""The functions that a formula needs besides + - * /, for one type of numbers: Python's, or the arrays of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """``exp_less_one(x)`` is exp(x) - 1, exact also where x is small. ``weighted(x, a, y, b)`` is ``x * a + y * b``, of numbers a and b; it
    may take the place of x."""

    cos: Callable[[Any], Any]
    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]
    root: Callable[[Any], Any]
    sign: Callable[[Any], Any]
    exp_less_one: Callable[[Any], Any]
    weighted: Callable[[Any, Any, Any, Any], Any] = lambda x, a, y, b: x * a + y * b


PLAIN = Arithmetic(
    cos=math.cos,
    least=min,
    most=max,
    root=math.sqrt,
    sign=lambda number: (number > 0) - (number < 0),
    exp_less_one=math.expm1,
)
"""For Python's numbers."""
