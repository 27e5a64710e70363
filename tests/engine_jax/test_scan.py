"""A stack of layers in one scan, and in a scan for each run of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.core.policies.runs import Run
from shardwright.engine_jax.io.layer_io import Params, Site
from shardwright.engine_jax.io.recomputation import recomputed
from shardwright.engine_jax.model.scan import scanned

NUM, WIDTH, ROWS = 7, 256, 8
RUNS = (range(3), range(3, 5), range(5, NUM))


def made() -> tuple[jax.Array, Params]:
    rng = np.random.default_rng(0)
    stacked = {"w": rng.standard_normal((NUM, WIDTH, WIDTH)) / 16, "b": rng.standard_normal((NUM, 1, WIDTH))}
    return jnp.ones((ROWS, WIDTH)), {name: jnp.asarray(one, jnp.float32) for name, one in stacked.items()}


def gradients(runs: tuple[range, ...], remat: str):
    def loss(stacked: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer_of(run: range):
            def layer(x: jax.Array, layer: Params, _: Site | None) -> tuple[jax.Array, jax.Array]:
                x = jnp.tanh(x @ layer["w"] + layer["b"] * (1 if run.start < 3 else 2))
                return x, x[0, 0]

            return layer

        def again_of(layers: range):
            again, none = frozenset({"x"} if remat == "full" else ()), frozenset[str]()
            run = Run(
                stack="layers",
                layers=layers,
                made=again,
                named=none,
                saved=none,
                hosted=none,
                again=again,
                gathers_again=False,
            )
            return partial(recomputed, run=run, num_layers=len(layers))

        x, kept = scanned(layer_of, x, stacked, lambda _: None, runs, again_of)
        return jnp.sum(x), kept

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_layer_of_each_run_has_its_own_weights_and_gradients(remat: str) -> None:
    """The layers of the last two runs are alike, so that one run of both is the same."""
    x, stacked = made()
    (loss, kept), by_name = gradients(RUNS, remat)(stacked, x)
    (expected, all_kept), of_two = gradients((range(3), range(3, NUM)), remat)(stacked, x)
    y, layers = x, []
    for number in range(NUM):
        y = jnp.tanh(y @ stacked["w"][number] + stacked["b"][number] * (1 if number < 3 else 2))
        layers.append(float(y[0, 0]))
    np.testing.assert_allclose(kept, layers, rtol=1e-5)
    np.testing.assert_allclose((loss, expected), float(jnp.sum(y)), rtol=1e-5)
    np.testing.assert_allclose(kept, all_kept, rtol=1e-6)
    for name, gradient in by_name.items():
        np.testing.assert_allclose(gradient, of_two[name], rtol=1e-5, atol=1e-6)
        assert np.abs(gradient).reshape(NUM, -1).max(1).min() > 0


def test_several_runs_need_no_more_memory_than_one() -> None:
    """Slices of the weights, or of their gradients, would be copies."""
    x, stacked = made()
    one, several = (
        gradients(runs, "full").lower(stacked, x).compile().memory_analysis() for runs in ((range(NUM),), RUNS)
    )
    assert several.temp_size_in_bytes < one.temp_size_in_bytes + stacked["w"].nbytes / NUM / 2


def test_a_single_layer_is_recomputed_too() -> None:
    """XLA unrolls its loop, and without a barrier would merge both computations: the plan counts both."""
    x, stacked = made()
    one = {name: array[:1] for name, array in stacked.items()}
    for runs, layers in (((range(1),), one), ((range(NUM - 1), range(NUM - 1, NUM)), stacked)):
        assert gradients(runs, "full").lower(layers, x).as_text().count("optimization_barrier") == 2
    assert gradients((range(NUM),), "full").lower(stacked, x).as_text().count("optimization_barrier") == 1
