"""How far two layouts may be apart in bfloat16: law 3, as a number for every weight, measured on the very model and rows.

Two layouts add the same numbers in two orders. So a model's first steps are made on one device in the order in which they are
written and in ``ORDERS`` others (``other_order.py``), and a layout may be as far from one device as those are, times a factor:

| quantity | measured | times |
|---|---|---|
| the gradient of a weight in a layer, \\|g - g1\\| / \\|g1\\| | the largest of all orders | ``OF_GRADIENTS`` |
| the loss, \\|l - l1\\| / l1 | the root of the mean square over all orders | ``OF_LOSS`` |

A gradient has thousands of elements, and its difference is nearly the same in each order. A loss is one number, whose
difference is often nothing by chance: so the factor is that of a deviation. ``python -m tests.sameness.orders`` measures how far
other orders, layouts and engines are, as shares of these bounds, and writes docs/sameness-bfloat16.md.

A token between two experts goes to either by the last bit of its activations, and is then another token: models with experts
are compared with all experts chosen (``EVERY_EXPERT``), whose weights are continuous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.resolution.request import Request
from tests.engine_jax.made_rows import Batch
from tests.engine_jax.steps import Run, gradient_differences
from tests.sameness.other_order import runs

ORDERS = 6
OF_GRADIENTS = 4.0
OF_LOSS = 6.0

EVERY_EXPERT = {
    "llama3-test": "",
    "mixtral-test": "num_experts=4,top_k=4",
    "deepseek3-test": "num_experts=8,top_k=8,num_groups=1,num_chosen_groups=1",
}
"""Settings under which no token has to choose, by model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Relative differences that are allowed, by step. ``gradients``: by weight and layer (``gradient_differences``)."""

    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, float], ...]


def bound_of(request: Request, batches: Sequence[Batch], seed: int) -> Bound:
    """For the first two steps of a request's model, whatever its layout. ``batches``: rows as they are written."""
    return bounded(request, batches, seed)[1]


def bounded(request: Request, batches: Sequence[Batch], seed: int) -> tuple[Run, Bound]:
    """The same, with the run on one device of PyTorch that it is a bound around."""
    whole, *others = runs(request, batches, seed, ORDERS)
    return whole, around(whole, others)


def around(whole: Run, others: Sequence[Run]) -> Bound:
    """The bound around a run, by others of other orders."""
    losses = np.stack([losses_apart(other, whole) for other in others])
    by_step = zip(*(gradients_apart(other, whole) for other in others), strict=True)
    return Bound(
        losses=tuple(OF_LOSS * np.sqrt(np.mean(losses**2, axis=0))),
        gradients=tuple({name: OF_GRADIENTS * max(one[name] for one in of) for name in of[0]} for of in by_step),
    )


def shares(bound: Bound, ours: Run, theirs: Run) -> dict[str, float]:
    """What two runs differ by, as shares of the bound: by weight and layer in the step where it is the most, and ``loss``."""
    found = {"loss": float(np.max(losses_apart(ours, theirs) / bound.losses))}
    for apart, allowed in zip(gradients_apart(ours, theirs), bound.gradients, strict=True):
        assert apart.keys() == allowed.keys()
        found |= {name: max(apart[name] / allowed[name], found.get(name, 0.0)) for name in apart}
    return found


def assert_within(bound: Bound, ours: Run, theirs: Run) -> None:
    """Two runs are no further apart than two orders of summing the same numbers."""
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    beyond = {name: share for name, share in shares(bound, ours, theirs).items() if not share <= 1}
    assert not beyond, f"further apart than other orders explain, in units of the bound: {beyond}"


def losses_apart(ours: Run, theirs: Run) -> np.ndarray:
    return np.abs(ours.losses - theirs.losses) / theirs.losses


def gradients_apart(ours: Run, theirs: Run) -> list[dict[str, float]]:
    return [gradient_differences(our, their) for our, their in zip(ours.gradients, theirs.gradients, strict=True)]
