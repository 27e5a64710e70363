"""When a stage gathers its weights over the axes that only store them, and when it reduces their gradients.

On PyTorch:

| schedule, recomputation | a layer's weights are gathered | gradients are reduce-scattered |
|---|---|---|
| none: no pipeline | for each pass | in each microbatch |
| no split backward, ``full`` or ``dots`` | for each pass | in each microbatch |
| no split backward, ``none`` | once a step | once a step |
| split backward | once a step | once a step |

The weight half of a split backward pass runs on what its input half left: weights that were freed in between would have no gradient, or
a wrong one, and no error would say so. With ``none`` nothing is computed again: memory is given for time, here too. In a pipeline the weights
of the ends are gathered once a step.

On JAX for each pass, and gradients are reduce-scattered in each microbatch; with ``keep_gathered`` both are done once a step for layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.schedules.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """``once``: a layer's weights are gathered once a step, and stay, and all gradients are reduced once. ``ends_once``: weights of the ends
    are gathered once. ``split``: the backward pass has two halves."""

    once: bool = False
    ends_once: bool = False
    split: bool = False


EACH_PASS = Gathering()
"""Without a pipeline."""


OF_SHARED_ENDS = Gathering(ends_once=True)
"""Of ends that all stages share, as those of a stage."""


def gathering_of(schedule: str | None, remat: str) -> Gathering:
    """
    >>> gathering_of("1f1b", "full").once, gathering_of("1f1b", "none").once, gathering_of("zbv", "full").split
    (False, True, True)
    """
    if schedule is None:
        return EACH_PASS
    split = SCHEDULES[schedule].splits
    return Gathering(once=split or remat == "none", ends_once=True, split=split)
