"""How much two layouts may differ in bfloat16: law 3, as a number for every weight, measured with the same model and rows.

Two layouts sum the same numbers in two orders. So a model's first steps are run on one device in the order of the program and
in ``ORDERS`` others (``other_order.py``). A layout may differ from one device as much as those do, times a factor:

| quantity | measured | times |
|---|---|---|
| the gradient of a weight in a layer, \\|g - g1\\| / \\|g1\\| | the largest of all orders | ``OF_GRADIENTS`` |
| the loss, \\|l - l1\\| / l1 | the root mean square over all orders | ``OF_LOSS`` |

A gradient has thousands of elements, and its difference is nearly the same in each order. A loss is one number, whose
difference is often 0 by chance, so its factor multiplies a standard deviation. ``python -m tests.sameness.orders`` measures how
much other orders, layouts and engines differ, as shares of these bounds, and writes docs/sameness-bfloat16.md.

The last bit of a token's activations can decide between two experts, and then the token's values differ. So models with experts
are compared with every token assigned to all experts (``EVERY_EXPERT``), whose routing scores are continuous.
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
"""Settings under which every token is assigned to all experts, by model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Relative differences that are allowed, by step. ``gradients``: by weight and layer (``gradient_differences``)."""

    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, float], ...]


def bound_of(request: Request, batches: Sequence[Batch], seed: int) -> Bound:
    """The bound for the first two steps of a request's model, whatever its layout. ``batches``: rows in the order of the text."""
    return bounded(request, batches, seed)[1]


def bounded(request: Request, batches: Sequence[Batch], seed: int) -> tuple[Run, Bound]:
    """The run on one device of PyTorch, and the bound of differences from it."""
    reference, *others = runs(request, batches, seed, ORDERS)
    return reference, bound_from(reference, others)


def bound_from(reference: Run, others: Sequence[Run]) -> Bound:
    """The bound of differences from a run, from runs in other orders."""
    losses = np.stack([losses_apart(other, reference) for other in others])
    by_step = zip(*(gradients_apart(other, reference) for other in others), strict=True)
    return Bound(
        losses=tuple(OF_LOSS * np.sqrt(np.mean(losses**2, axis=0))),
        gradients=tuple({name: OF_GRADIENTS * max(one[name] for one in of) for name in of[0]} for of in by_step),
    )


def shares(bound: Bound, ours: Run, theirs: Run) -> dict[str, float]:
    """The differences of two runs as shares of the bound: ``loss``, and each weight and layer in the step with the largest share."""
    found = {"loss": float(np.max(losses_apart(ours, theirs) / bound.losses))}
    for apart, allowed in zip(gradients_apart(ours, theirs), bound.gradients, strict=True):
        assert apart.keys() == allowed.keys()
        found |= {name: max(apart[name] / allowed[name], found.get(name, 0.0)) for name in apart}
    return found


def assert_within(bound: Bound, ours: Run, theirs: Run) -> None:
    """Two runs differ by no more than two orders of summation of the same numbers."""
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    beyond = {name: share for name, share in shares(bound, ours, theirs).items() if not share <= 1}
    assert not beyond, f"differences above the bound, as shares of it: {beyond}"


def losses_apart(ours: Run, theirs: Run) -> np.ndarray:
    return np.abs(ours.losses - theirs.losses) / theirs.losses


def gradients_apart(ours: Run, theirs: Run) -> list[dict[str, float]]:
    return [gradient_differences(our, their) for our, their in zip(ours.gradients, theirs.gradients, strict=True)]
