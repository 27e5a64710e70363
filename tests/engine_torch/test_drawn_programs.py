"""The interpreter runs any program of its primitives: the loss and the gradients of a plain evaluation, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
import torch

from shardwright.core.program.program import Program, WeightUse
from shardwright.core.program.walk import walk_through
from shardwright.engine_torch.io.layer_io import NO_SITE, Links
from shardwright.engine_torch.model.forward import Ends
from shardwright.engine_torch.model.interpreter import Calls, Now
from shardwright.engine_torch.model.prepared import Preparation
from tests.matrix import some
from tests.models.drawn_programs import Drawing, drawn_program
from tests.models.evaluated import computed
from tests.models.test_sums import drawn_batch, drawn_params

SEEDS = 40
WHERE_IT_IS = Links(
    move=lambda _source, _target, array: array,
    use=lambda _name, weight, _component=None: weight,
    dtype=torch.float32,
)


def as_stored(use: WeightUse, weight: torch.Tensor) -> torch.Tensor:
    """A weight with the dims of the program, as PyTorch stores it."""
    if use.torch_dims is None:
        return weight
    sizes = dict(zip(use.logical_axes, weight.shape, strict=True))
    order = [use.logical_axes.index(axis) for merged in use.torch_dims for axis in merged]
    return weight.permute(order).reshape([prod(sizes[axis] for axis in merged) for merged in use.torch_dims])


def by_the_engine(program: Program, params: Mapping[str, torch.Tensor], batch: Mapping[str, Any]) -> torch.Tensor:
    walk = walk_through(program)
    fields = {name: torch.tensor(np.asarray(batch[field.name])) for name, field in walk.fields.items()}
    uses = {(step.stack, use.name): use for step in program.steps for use in step.weights}
    prepared = Preparation(walk, [*walk.layers], WHERE_IT_IS, None)(fields)
    ends = Ends(walk, WHERE_IT_IS)
    of_ends = {name: as_stored(use, params[name]) for (stack, name), use in uses.items() if stack is None}
    x_BLM = ends.embedded(fields, of_ends)
    for stack in program.stacks:
        calls = Calls(walk, walk.layers[stack.name], [stack.input], [stack.output], WHERE_IT_IS)
        own = {name: use for (of, name), use in uses.items() if of == stack.name}
        for number in range(stack.num):
            weights = {name: as_stored(use, params[f"{stack.name}.{name}"][number]) for name, use in own.items()}
            (x_BLM,) = calls(Now(weights, {}, prepared), x_BLM)
    return ends.scored(fields, x_BLM, of_ends, NO_SITE)[1]


@pytest.mark.parametrize("seed", some(range(SEEDS), range(5)))
def test_losses_and_gradients_are_those_of_a_plain_evaluation(seed: int) -> None:
    program = drawn_program(Drawing(seed=seed))
    params, batch = drawn_params(program, seed), drawn_batch(seed)
    ours = {name: torch.tensor(np.asarray(weight), requires_grad=True) for name, weight in params.items()}
    loss = by_the_engine(program, ours, batch)
    loss.backward()
    expected, theirs = jax.jit(jax.value_and_grad(lambda params: computed(program, params, batch)[0]))(params)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-5)
    for name, gradient in theirs.items():
        own = ours[name].grad
        assert own is not None, name
        np.testing.assert_allclose(own, gradient, rtol=0, atol=2e-4 * np.abs(gradient).max(), err_msg=name)
