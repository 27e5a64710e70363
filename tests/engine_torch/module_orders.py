"""How far other orders of summation in one process move a model of modules: law 3's bound where one element decides all codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.engine_torch.own_modules import Trained, trained
from tests.sameness.other_order import in_another_order

ORDERS, OF_ORDERS = 3, 2.0


def moved_by_orders(right: Trained, model: str, recipe: str, steps: int) -> Sequence[float]:
    """By step, the largest difference of an output or a gradient from those of ``right``, relative to its norm, times
    ``OF_ORDERS``."""
    found = [0.0] * len(right.steps)
    for seed in range(ORDERS):
        with in_another_order(seed, 0, wide=True):
            other = trained("one", model, recipe, "", False, steps)
        for number, (ours, theirs) in enumerate(zip(other.steps, right.steps, strict=True)):
            pairs = [(ours.output, theirs.output)]
            pairs += [(ours.gradients[name], gradient) for name, gradient in theirs.gradients.items()]
            # A layer without tokens has no gradient.
            apart = [np.linalg.norm(our - their) / np.linalg.norm(their) for our, their in pairs if their.any()]
            found[number] = max(found[number], OF_ORDERS * float(max(apart)))
    return found
