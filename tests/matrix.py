"""Which cases of a long list `make test` runs: a covering part. `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(cases: Sequence[Any], kept: Iterable[int]) -> list[Any]:
    """Parameters of a test: the cases with these numbers, and all others with the marker ``matrix``."""
    numbers = set(kept)
    assert numbers <= set(range(len(cases))), (numbers, len(cases))
    return [case if number in numbers else rest(case) for number, case in enumerate(cases)]


def rest(*values: Any) -> Any:
    """One parameter that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.matrix)
