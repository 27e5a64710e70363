"""How much two layouts may differ under a recipe of low precision: law 3, measured on one device with the same model and rows.

| quantity | measured on one device | a layout may differ by |
|---|---|---|
| the loss of a step, \\|l - l1\\| / l1 | ``ORDERS`` other orders of all sums (``other_order.py``), root mean square | ``OF_LOSS`` times the largest of this step and those before it |
| the gradient of a weight in a layer in step 1, \\|g - g1\\| / \\|g1\\| | how far the recipe moves it from that without a recipe | twice that |

Another order of an expert's tokens moves all that their order decides: blocks along them, Hadamard transforms and random numbers, which the
plan says to be not free of the layout. Elsewhere another order changes last bits, and now and then one decides between two codes, which are
up to a quarter apart. In which step that happens is chance, and what has changed the weights stays: so the bound of a loss does not
become smaller again. One code may move the gradient of keys, which is a small difference of large numbers, more than all of these
orders do by chance. But each of two gradients is no farther from that without a recipe than the recipe's own error, so they are no
farther from each other than twice that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardwright.core.planning import make_plan
from tests.engine_jax.made_rows import Batch, tokens_of
from tests.engine_jax.steps import Run, gradient_differences
from tests.engine_torch.runs import trained_on
from tests.sameness.bounds import OF_LOSS, losses_apart
from tests.sameness.other_order import Here, runs
from tests.sameness.recipe_cases import ROWS, VOCAB, RecipeCase, request_of

ORDERS, OF_ERROR = 16, 2.0
"""In two models none of four orders changed a code, so that their bound was that of last bits."""
LAST_BITS = 1e-6
"""Of a loss in float32: where no code has changed in any order, all of them may have the same loss."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBound:
    """``losses``: by step. ``gradients``: of step 1, by weight and layer."""

    losses: np.ndarray
    gradients: Mapping[str, float]


def batches(num: int) -> list[Batch]:
    return [tokens_of(step, ROWS, VOCAB) for step in range(num)]


@cache
def bounded(alone: RecipeCase, steps: int, orders: int = ORDERS) -> tuple[Run, RecipeBound]:
    """The first steps on one device of PyTorch, and the bound of differences from them."""
    request = request_of(alone, "torch")
    reference, *others = runs(request, batches(steps), SEED, orders)
    apart = np.stack([losses_apart(other, reference) for other in others])
    high = trained_on(Here(), make_plan(replace(request, precision=None)), batches(1), SEED).run
    error = gradient_differences(reference.gradients[0], high.gradients[0])
    bound = RecipeBound(
        losses=np.maximum(LAST_BITS, OF_LOSS * np.maximum.accumulate(np.sqrt(np.mean(apart**2, axis=0)))),
        gradients={name: OF_ERROR * by for name, by in error.items()},
    )
    return reference, bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Differences from one device: the largest of a loss, and as shares of the bounds; the weight of the gradient."""

    loss: float
    of_loss: float
    of_gradient: float
    weight: str


def share(run: Run, reference: Run, bound: RecipeBound) -> Share:
    np.testing.assert_array_equal(run.tokens, reference.tokens)
    losses = losses_apart(run, reference)
    apart = gradient_differences(run.gradients[0], reference.gradients[0])
    # What no recipe moves has no error but that of float32.
    shares = {name: by / max(bound.gradients[name], 10 * LAST_BITS) for name, by in apart.items()}
    weight = max(shares, key=shares.__getitem__)
    return Share(
        loss=float(losses.max()),
        of_loss=float((losses / bound.losses).max()),
        of_gradient=shares[weight],
        weight=weight,
    )
