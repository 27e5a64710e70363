"""The optimizer for every engine: the learning rate, the average of the weights, what is kept for each weight, and which weights
are decayed or frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardwright.core.model.optimizer import AVERAGE, FIRST, MASTER, SECOND
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import UPDATE
from shardwright.core.quantization.delayed import DELAYED
from shardwright.training.arithmetic import PLAIN, Arithmetic
from shardwright.training.optimizers import OPTIMIZER
from shardwright.training.options import RunOptions

FINAL_LR_SHARE = 0.1
"""The cosine ends at a tenth of the peak (arXiv:2302.13971, section 2.3)."""

BIAS_RATE = 1e-3
"""The change of a routing bias in a step (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""

STATE = (MASTER.prefix, FIRST, SECOND, OPTIMIZER, AVERAGE.prefix, DELAYED)
"""How the names of a checkpoint begin that are no weights, and that a run keeps for its weights and their products."""


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


def average_share(average: float, count: Any, arithmetic: Arithmetic = PLAIN) -> Any:
    """How far the average of the weights goes towards them in step ``count``, counted from 1.

    After t steps the average is the mean of the weights after steps 1 to t with weights ``average ** (t - i)``: the
    exponential average from zero, corrected for its bias (arXiv:1412.6980, section 3). It is kept corrected, so it can be
    used after any step, and the weights before the first step are not in it.

    >>> [round(average_share(0.5, count), 4) for count in (1, 2, 3, 100)]
    [1.0, 0.6667, 0.5714, 0.5]
    """
    return (1 - average) / -arithmetic.exp_less_one(count * math.log(average))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor that a step keeps for a weight. ``name``: in a checkpoint; it begins with ``prefix``."""

    name: str
    prefix: str
    weight: str
    dtype: str


def kept_tensors(plan: Plan) -> tuple[KeptTensor, ...]:
    """What a step keeps for the trained weights, prefix by prefix, each in the order of the weights."""
    frozen = frozen_names(plan)
    return tuple(
        KeptTensor(name=kept.prefix + row.name, prefix=kept.prefix, weight=row.name, dtype=str(kept.dtype))
        for kept in plan.request.kept
        for row in plan.weights
        if row.name not in frozen and kept.has(row.name)
    )


def owner_of(name: str) -> str:
    """The weight of a tensor of a checkpoint, by its name: what follows the last '/'; a tensor of delayed amaxes is sharded in its own
    way.

    >>> owner_of("moments.first/layers.attention.q"), owner_of("layers.attention.q")
    ('layers.attention.q', 'layers.attention.q')
    >>> owner_of("delayed.factor/layers.attention.q.input")
    'delayed.factor/layers.attention.q.input'
    """
    if name.startswith(DELAYED):
        return name
    return name.rpartition("/")[2]


def saved_as(plan: Plan, name: str) -> str:
    """What a tensor of a checkpoint is sharded as, by the names of ``saved_boxes``: its weight, or the update of that, where it is kept for
    a weight whose update is sharded in another way. A weight that rests as codes is that of its update."""
    owner = owner_of(name)
    of_update = owner != name or any(one.rests for one in plan.quantized if one.name == owner)
    row = next((row for row in plan.weights if row.name == owner), None) if of_update else None
    return UPDATE + owner if row is not None and row.update_is_sharded else owner


def frozen_names(plan: Plan) -> frozenset[str]:
    """The weights that are not trained by gradients."""
    return frozenset(weight.name for weight in plan.request.table.weights if weight.frozen)


def decayed_names(plan: Plan) -> frozenset[str]:
    """The weights with weight decay: matrices have it, scales and biases do not."""
    return frozenset(weight.name for weight in plan.request.table.weights if len(weight.shape) > 1)


def stacked_names(plan: Plan) -> frozenset[str]:
    """The trained weights whose dim 0 is the layers of a stack, where an engine keeps them so."""
    return frozenset(weight.name for weight in plan.request.table.weights if weight.stack and not weight.frozen)
