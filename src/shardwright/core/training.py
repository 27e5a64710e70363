"""What every engine trains by: AdamW's constants, the schedule's, and which weights they are for."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.plan import Plan
from shardwright.core.run import RunOptions

BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8
"""AdamW's constants as Llama and DeepSeek-V3 publish them (arXiv:2302.13971, section 2.3; arXiv:2412.19437, 4.2)."""

FINAL_LR_SHARE = 0.1
"""The cosine ends at a tenth of the peak (arXiv:2302.13971, section 2.3)."""

BIAS_RATE = 1e-3
"""How far a routing bias moves in a step (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""

FIRST, SECOND = "moments.first/", "moments.second/"
"""What a checkpoint puts before the name of a weight to name its moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """``lr`` is the peak; ``warmup`` and ``steps`` count optimizer steps; ``clip`` bounds the global norm."""

    lr: float
    warmup: int
    steps: int
    weight_decay: float
    clip: float


def optimizer_options(options: RunOptions) -> OptimizerOptions:
    """Those of a run."""
    return OptimizerOptions(
        lr=options.lr,
        warmup=options.warmup,
        steps=options.steps,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


def frozen_names(plan: Plan) -> frozenset[str]:
    """The weights that no gradient trains."""
    return frozenset(weight.name for weight in plan.request.table.weights if weight.frozen)


def decayed_names(plan: Plan) -> frozenset[str]:
    """The weights that shrink by the weight decay: matrices do, scales and biases do not."""
    return frozenset(weight.name for weight in plan.request.table.weights if len(weight.shape) > 1)
