"""``quantized_model_init``: all modules that are constructed inside of it have weights that rest as codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from shardwright.core.findings.errors import InputError

PrimaryWeights = Literal["codes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """What a module that multiplies is constructed with, where its own arguments do not say it. ``recipe``: None leaves it without one."""

    primary_weights: PrimaryWeights | None = None
    recipe: object = None
    preserve_high_precision_init_val: bool = False


_CURRENT: ContextVar[WeightOptions | None] = ContextVar("weight_options", default=None)


def weight_options() -> WeightOptions:
    """Those that hold now."""
    return _CURRENT.get() or WeightOptions()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: object = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Inside of it modules are constructed as with ``primary_weights="codes"``: their weights rest as codes from ``reset_parameters`` on. The
    arguments are those of Transformer Engine.

    ``recipe``: that of modules without one of their own. Modules that have none at all, and norms and embeddings, stay in high precision.
    ``preserve_high_precision_init_val``: initial values are kept until ``keep_main_weights`` takes them. ``enabled``: False has no effect
    but to end that of a context around it.

    >>> from shardwright.engine_torch.modules import Linear
    >>> with quantized_model_init(recipe="mxfp8"):
    ...     layer = Linear(32, 32)
    >>> layer.primary_weights
    'codes'
    """
    options = WeightOptions()
    if enabled:
        options = WeightOptions(
            primary_weights="codes",
            recipe=recipe,
            preserve_high_precision_init_val=preserve_high_precision_init_val,
        )
    before = _CURRENT.set(options)
    try:
        yield
    finally:
        _CURRENT.reset(before)


fp8_model_init = quantized_model_init
"""``quantized_model_init`` under the name that Transformer Engine had before it."""


def require_primary(primary_weights: object, label: str) -> None:
    if primary_weights not in (None, "codes"):
        raise InputError(f"{label}: primary_weights is {primary_weights!r}; it must be 'codes' or None.")
