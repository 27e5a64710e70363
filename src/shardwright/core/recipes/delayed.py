"""Delayed scaling: the factor of a tensor follows from its amaxes in earlier steps, so it is known before the step (DelayedScaling;
arXiv:2209.05433, section 3).

A tensor has a factor, by which its elements are multiplied (``scale`` in Transformer Engine), and the amaxes of its last steps,
``[..., amax_history_len]``: the oldest first, the most recent last. Place 0 is that of the amax to come, and 0 between two steps.
Before the first step the factor is 1, and all amaxes are 0.

| after a step | |
|---|---|
| the amax of it is finite | it enters the history, and the oldest leaves it |
| it is infinite or NaN | 0 enters, so that one step does not hold the factor for as long as the history is |
| ``max``, ``most_recent`` | of all amaxes with this one the largest, or this one |
| this is above 0 | the factor is ``largest / amax / 2**margin``, of which the quotient is rounded to float32 |
| it is 0 | the factor stays |
| ``interval`` | in other steps than every so many the factor stays, and amaxes enter all the same |

A factor is from 2^-126 to 2^126, so that it and the scale, its reciprocal, are no subnormal numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwright.core.recipes.arrays import Arrays
from shardwright.core.recipes.formats import FORMATS
from shardwright.core.recipes.formula import INFINITE, LEAST_SCALE
from shardwright.core.recipes.recipe import PER_TENSOR, History, Quantizer, Scale

FIRST_FACTOR = 1.0


class Delayed(NamedTuple):
    """What a run keeps of tensors with one quantizer, float32. ``history``: of each factor, along its last dim."""

    factor: Any
    history: Any


def after_step(before: Delayed, amax: Any, quantizer: Quantizer, rule: History, step: Any, on: Arrays) -> Delayed:
    """The factors and histories after a step. ``amax``: of each tensor in it, int32 bits. ``step``: the number of this one, from 1."""
    amax = on.where(amax < INFINITE, amax, amax * 0)
    seen = on.joined(before.history[..., 1:], on.of_bits(amax)[..., None])
    chosen = amax
    if rule.amax_compute_algo == "max":
        chosen = on.largest(on.bits(seen), (len(seen.shape) - 1,))[..., 0]
    is_due = step % rule.interval == 0
    return Delayed(
        factor=on.where((chosen > 0) & is_due, factor_of(chosen, quantizer, on, margin=rule.margin), before.factor),
        history=on.joined(seen[..., :1] * 0, seen[..., 1:]),
    )


def factor_of(amax: Any, quantizer: Quantizer, on: Arrays, *, margin: int = 0) -> Any:
    """What a tensor whose amax is ``amax``, int32 bits, is multiplied by, so that its largest element has the largest code."""
    element = FORMATS[quantizer.dtype]
    bounded = on.most(on.of_bits(amax), element.largest * LEAST_SCALE)
    return on.most(on.quotient(element.largest * 2.0**-margin, bounded), LEAST_SCALE)


def is_computed(quantizer: Quantizer) -> bool:
    """Whether a quantizer with a delayed amax has the only form that is computed: one exact scale of the tensor."""
    return quantizer.block == PER_TENSOR and quantizer.scale == Scale(rule="exact")
