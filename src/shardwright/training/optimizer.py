"""The optimizer for every engine: AdamW's constants, the learning rate, and the weights that are decayed or frozen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.core.plan.plan import Plan
from shardwright.training.options import RunOptions

BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8
"""AdamW's constants as Llama and DeepSeek-V3 publish them (arXiv:2302.13971, section 2.3; arXiv:2412.19437, 4.2)."""

FINAL_LR_SHARE = 0.1
"""The cosine ends at a tenth of the peak (arXiv:2302.13971, section 2.3)."""

BIAS_RATE = 1e-3
"""The change of a routing bias in a step (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""

FIRST, SECOND = "moments.first/", "moments.second/"
"""The prefixes of a weight's name that name its moments in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """``lr`` is the peak; ``warmup`` and ``steps`` count optimizer steps; ``clip`` bounds the global norm."""

    lr: float
    warmup: int
    steps: int
    weight_decay: float
    clip: float


def optimizer_options(options: RunOptions) -> OptimizerOptions:
    """The optimizer options of a run."""
    return OptimizerOptions(
        lr=options.lr,
        warmup=options.warmup,
        steps=options.steps,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The functions that a formula needs, for one type of numbers. An engine's arrays have their own."""

    cos: Callable[[Any], Any]
    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]


PLAIN = Arithmetic(cos=math.cos, least=min, most=max)
"""For Python's numbers."""


def learning_rate(options: OptimizerOptions, step: Any, arithmetic: Arithmetic = PLAIN) -> Any:
    """The learning rate after ``step`` steps: linear over ``warmup``, then a cosine to a tenth at ``steps``.

    With a warm-up the first step already has a rate above 0: at learning rate 0 it would train nothing.

    >>> options = OptimizerOptions(lr=1.0, warmup=2, steps=4, weight_decay=0.1, clip=1.0)
    >>> [round(learning_rate(options, step), 4) for step in range(5)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """
    count = step + 1 if options.warmup else step
    span = max(options.steps - options.warmup, 1)
    share = arithmetic.least(arithmetic.most((count - options.warmup) / span, 0.0), 1.0)
    cosine = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + arithmetic.cos(math.pi * share)) / 2
    # The cosine stays at its maximum until the warm-up ends.
    return options.lr * (arithmetic.least(count / options.warmup, cosine) if options.warmup else cosine)


def frozen_names(plan: Plan) -> frozenset[str]:
    """The weights that are not trained by gradients."""
    return frozenset(weight.name for weight in plan.request.table.weights if weight.frozen)


def decayed_names(plan: Plan) -> frozenset[str]:
    """The weights with weight decay: matrices have it, scales and biases do not."""
    return frozenset(weight.name for weight in plan.request.table.weights if len(weight.shape) > 1)
