"""The interpreter runs any program of its primitives: the loss and the gradients of a plain evaluation, on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.core.program.program import Program
from shardwright.core.program.walk import walk_through
from shardwright.engine_jax.io.layer_io import Links
from shardwright.engine_jax.model.ends import embedded, loss_of
from shardwright.engine_jax.model.forward import computed_layer
from shardwright.engine_jax.model.prepared import prepare
from tests.matrix import some
from tests.models.drawn_programs import Drawing, drawn_program
from tests.models.evaluated import computed
from tests.models.test_sums import drawn_batch, drawn_params

SEEDS = 40


def as_it_is(name: str, weight: Any, component: str | None = None, *, high: bool = False, factor: Any = None) -> Any:
    del name, component, high, factor
    return weight


WHERE_IT_IS = Links(move=lambda *given: given[-1], use=as_it_is, use_twice=as_it_is)


def by_the_engine(program: Program, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
    walk = walk_through(program)
    fields = {name: batch[field.name] for name, field in walk.fields.items()}
    prepared = prepare(fields, walk, WHERE_IT_IS)
    x_BLM, tied = embedded(fields, params, walk, WHERE_IT_IS)
    for stack in program.stacks:
        prefix = f"{stack.name}."
        for number in range(stack.num):
            weights = {name.removeprefix(prefix): of[number] for name, of in params.items() if name.startswith(prefix)}
            x_BLM, _ = computed_layer(x_BLM, stack, prepared, weights, walk, WHERE_IT_IS)
    return loss_of(x_BLM, params, tied, fields, walk, WHERE_IT_IS)


@pytest.mark.parametrize("seed", some(range(SEEDS), range(5)))
def test_losses_and_gradients_are_those_of_a_plain_evaluation(seed: int) -> None:
    program = drawn_program(Drawing(seed=seed))
    params, batch = drawn_params(program, seed), drawn_batch(seed)
    loss, ours = jax.jit(jax.value_and_grad(lambda params: by_the_engine(program, params, batch)))(params)
    expected, theirs = jax.jit(jax.value_and_grad(lambda params: computed(program, params, batch)[0]))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=2e-4 * np.abs(gradient).max(), err_msg=name)
