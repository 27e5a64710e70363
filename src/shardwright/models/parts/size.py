"""A named size of a family: its dimensions, and how it is run by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.core.findings.errors import InputError
from shardwright.core.model.training_only import TrainingOnly

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Natural:
    """The default layout, complete mesh and global batch of a size."""

    layout: str
    mesh: Mapping[str, int]
    batch: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(Generic[Config]):
    """A named size. ``dtype`` is the dtype of its computation; ``training_only``: what its configuration says of training alone."""

    config: Config
    natural: Natural
    dtype: str = "bfloat16"
    training_only: tuple[TrainingOnly, ...] = ()


def require_positive(**dimensions: int | float) -> None:
    """Refuse dimensions below 1 (or, for a float, not above 0)."""
    for name, value in dimensions.items():
        if value < 1 if isinstance(value, int) else value <= 0:
            raise InputError(f"{name} is {value}, and must be above 0.")


def require_multiple(**dimensions: int) -> None:
    """Refuse two dimensions, given by name, of which the first is not a multiple of the second."""
    (name, value), (of, divisor) = dimensions.items()
    if value % divisor:
        raise InputError(f"{name} is {value}, and must be a multiple of {of}, which is {divisor}.")


def require_above(**dimensions: float) -> None:
    """Refuse two dimensions, given by name, of which the first is not above the second."""
    (name, value), (of, limit) = dimensions.items()
    if not value > limit:
        raise InputError(f"{name} is {value}, and must be above {of}, which is {limit}.")


def require_at_most(**dimensions: int) -> None:
    """Refuse two dimensions, given by name, of which the first is larger than the second."""
    (name, value), (of, limit) = dimensions.items()
    if value > limit:
        raise InputError(f"{name} is {value}, and must not be above {of}, which is {limit}.")
