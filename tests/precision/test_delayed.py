"""Delayed scaling against the formula of Transformer Engine in NumPy: the state after steps, the codes, and the amaxes of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from shardwright.core.recipes.delayed import Delayed, after_step
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import History, Quantizer
from shardwright.engine_jax.experts.grouped_low import quantized_grouped_product as grouped_on_jax
from shardwright.engine_jax.io.layer_io import LowPrecision as JaxLow
from shardwright.engine_jax.io.layer_io import Site as JaxSite
from shardwright.engine_jax.layers.product import weight_product as on_jax
from shardwright.engine_jax.precision.arrays import ARRAYS as OF_JAX
from shardwright.engine_jax.precision.delayed import several
from shardwright.engine_torch.io.layer_io import LowPrecision as TorchLow
from shardwright.engine_torch.io.layer_io import Site as TorchSite
from shardwright.engine_torch.layers.product import weight_product as on_torch
from shardwright.engine_torch.precision.arrays import ARRAYS as OF_TORCH
from shardwright.engine_torch.precision.products import quantized_grouped_product as grouped_on_torch
from tests.precision.made import ordinary

F32 = np.float32
LARGEST = {"float8_e4m3fn": F32(448), "float8_e5m2": F32(57344)}
QUANTIZERS = preset("fp8-delayed").quantizers
INPUT, GRADIENT = QUANTIZERS["output", "input"], QUANTIZERS["input_gradient", "output_gradient"]
NAMES = {place: f"w.{place[1]}" for place in QUANTIZERS}


class TransformerEngine:
    """``scale`` and ``amax_history`` of one tensor as its recipe updates them at the end of a step: the amax of the step is in place 0,
    the scale follows, the history rolls by one, and place 0 is 0."""

    def __init__(self, length: int, largest: np.float32, margin: int, algorithm: str) -> None:
        self.scale, self.history = F32(1), np.zeros(length, F32)
        self.largest, self.margin, self.algorithm = largest, margin, algorithm

    def step(self, amax: np.float32) -> None:
        self.history[0] = amax
        amax = self.history.max() if self.algorithm == "max" else self.history[0]
        if np.isfinite(amax) and amax > 0:
            self.scale = F32(F32(self.largest / amax) / F32(2**self.margin))
        self.history = np.roll(self.history, -1)
        self.history[0] = 0


def amaxes(seed: int) -> np.ndarray:
    """Of 40 steps, with steps of zeros at the start and between."""
    rng = np.random.default_rng(seed)
    found = np.ldexp(rng.uniform(1, 2, 40), rng.integers(-60, 60, 40)).astype(F32)
    found[[0, 1, 7, 20, 21, 22]] = 0
    return found


@pytest.mark.parametrize("quantizer", [INPUT, GRADIENT], ids=lambda one: one.dtype)
@pytest.mark.parametrize(
    "rule", [History(), History(amax_history_len=1), History(amax_history_len=5, margin=2)], ids=str
)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_state_follows_as_in_transformer_engine(quantizer: Quantizer, rule: History, algorithm: str) -> None:
    rule = replace(rule, amax_compute_algo=algorithm)
    theirs = TransformerEngine(rule.amax_history_len, LARGEST[quantizer.dtype], rule.margin, algorithm)
    of_jax = Delayed(factor=jnp.ones(()), history=jnp.zeros(rule.amax_history_len))
    of_torch = Delayed(factor=torch.ones(()), history=torch.zeros(rule.amax_history_len))
    step_on_jax = jax.jit(partial(after_step, quantizer=quantizer, rule=rule, on=OF_JAX))
    for number, amax in enumerate(amaxes(3), 1):
        theirs.step(amax)
        bits = amax.view(np.int32)
        of_jax = Delayed(*step_on_jax(of_jax, jnp.asarray(bits), step=number))
        of_torch = after_step(of_torch, torch.tensor(int(bits), dtype=torch.int32), quantizer, rule, number, OF_TORCH)
        for ours in (of_jax, of_torch):
            np.testing.assert_array_equal(np.asarray(ours.factor), theirs.scale)
            np.testing.assert_array_equal(np.asarray(ours.history), theirs.history)


def followed(values: list[float], rule: History) -> list[tuple[float, list[float]]]:
    state, found = Delayed(factor=torch.ones(()), history=torch.zeros(rule.amax_history_len)), []
    for number, value in enumerate(values, 1):
        bits = torch.tensor(value).view(torch.int32)
        state = after_step(state, bits, INPUT, rule, number, OF_TORCH)
        found.append((float(state.factor), state.history.tolist()))
    return found


def test_an_amax_that_is_not_finite_holds_no_factor() -> None:
    """Neither the history nor the factor has it, and the next step goes on."""
    rule = History(amax_history_len=3)
    assert followed([7.0, float("inf"), float("nan"), 14.0], rule) == [
        (64.0, [0.0, 0.0, 7.0]),
        (64.0, [0.0, 7.0, 0.0]),
        # The 7 is the oldest of the three with this one.
        (64.0, [0.0, 0.0, 0.0]),
        (32.0, [0.0, 0.0, 14.0]),
    ]


def test_an_interval_computes_factors_in_some_steps_only() -> None:
    rule = History(amax_history_len=4, interval=2)
    assert followed([7.0, 14.0, 28.0, 7.0], rule) == [
        (1.0, [0.0, 0.0, 0.0, 7.0]),
        (32.0, [0.0, 0.0, 7.0, 14.0]),
        (32.0, [0.0, 7.0, 14.0, 28.0]),
        (16.0, [0.0, 14.0, 28.0, 7.0]),
    ]


def test_a_factor_and_its_scale_are_never_subnormal() -> None:
    tiny, huge = 2.0**-126, float(np.finfo(F32).max)
    assert followed([tiny], History(amax_compute_algo="most_recent", amax_history_len=1))[0][0] == 2.0**126
    assert followed([huge], History(margin=1000, amax_history_len=1))[0][0] == 2.0**-126


def made() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return ordinary(0, (2, 24, 40)), ordinary(1, (40, 32)), ordinary(2, (2, 24, 32))


FACTORS = {"w.input": 2.0**-9 * 1.3, "w.weight": 0.7, "w.output_gradient": 2.0**6 * 1.1}
"""Some elements are beyond the range."""


def values(x: np.ndarray, of: str) -> np.ndarray:
    quantizer = GRADIENT if of == "output_gradient" else INPUT
    factor, largest = F32(FACTORS[f"w.{of}"]), LARGEST[quantizer.dtype]
    codes = np.clip(x * factor, -largest, largest).astype(getattr(ml_dtypes, quantizer.dtype))
    return codes.astype(np.float64) * np.float64(F32(1) / factor)


def test_products_have_the_given_factors_and_leave_their_amaxes() -> None:
    x, w, g = made()
    flat_x, flat_g = x.reshape(48, 40), g.reshape(48, 32)
    terms = [(values(flat_x, "input"), values(w, "weight")), (values(flat_g, "output_gradient"), values(w, "weight").T)]
    terms.append((values(flat_x, "input").T, values(flat_g, "output_gradient")))
    for engine, (products, found) in {"JAX": jax_products(x, w, g), "PyTorch": torch_products(x, w, g)}.items():
        for ours, (a, b) in zip(products, terms, strict=True):
            bound = a.shape[1] * 2.0**-23 * (np.abs(a) @ np.abs(b))
            assert (np.abs(ours.reshape(bound.shape) - a @ b) <= bound).all(), engine
        assert found == {
            "w.input": float(np.abs(x).max()),
            "w.weight": float(np.abs(w).max()),
            "w.output_gradient": float(np.abs(g).max()),
        }, engine


def jax_products(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[list[np.ndarray], dict[str, float]]:
    def product(x: jax.Array, w: jax.Array, factors: dict[str, jax.Array]) -> jax.Array:
        low = JaxLow(quantizers=QUANTIZERS, name="w", delayed=NAMES, site=JaxSite(factors=factors))
        return on_jax("BLK,KM->BLM", x, w, low=low)

    def all_of(x: jax.Array, w: jax.Array, g: jax.Array, factors: dict[str, jax.Array]):
        y, pull = jax.vjp(product, x, w, factors)
        return y, *pull(g)

    factors = {name: jnp.float32(factor) for name, factor in FACTORS.items()}
    y, d_x, d_w, found = jax.jit(all_of)(x, w, g, factors)
    return [np.asarray(y), np.asarray(d_x), np.asarray(d_w)], {name: float(one) for name, one in found.items()}


def torch_products(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[list[np.ndarray], dict[str, float]]:
    site = TorchSite(
        factors={name: torch.tensor(factor) for name, factor in FACTORS.items()},
        amaxes={name: torch.zeros((), dtype=torch.int32) for name in FACTORS},
    )
    tokens, weight = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w.T.copy()).requires_grad_()
    y = on_torch(tokens, weight, low=TorchLow(quantizers=QUANTIZERS, name="w", delayed=NAMES, site=site))
    y.backward(torch.from_numpy(g))
    assert tokens.grad is not None
    assert weight.grad is not None
    found = {name: float(one.view(torch.float32)) for name, one in site.amaxes.items()}
    return [y.detach().numpy(), tokens.grad.numpy(), weight.grad.numpy().T], found


def test_infinite_elements_never_become_finite() -> None:
    x, w, g = made()
    x[0, 3, 7] = np.inf
    y = jax_products(x, w, g)[0][0]
    assert np.isnan(y[0, 3]).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(torch_products(x, w, g)[0][0]))
    assert np.isfinite(y[1]).all()


def test_of_several_products_with_one_weight_the_largest_amax_counts() -> None:
    """On JAX cotangents of several uses are added."""
    x, w, g = (jnp.asarray(one) for one in made())

    def twice(factors: dict[str, jax.Array]) -> jax.Array:
        low = several(JaxLow(quantizers=QUANTIZERS, name="w", delayed=NAMES, site=JaxSite(factors=factors)), 2)
        halves = [on_jax("BLK,KM->BLM", half, w, low=one) for half, one in zip((x[:1], x[1:]), low, strict=True)]
        return jnp.sum(jnp.concatenate(halves) * g)

    found = jax.jit(jax.grad(twice))({name: jnp.float32(factor) for name, factor in FACTORS.items()})
    assert float(found["w.input"]) == float(jnp.abs(x).max())
    assert float(found["w.output_gradient"]) == float(jnp.abs(g).max())


SIZES = (9, 0, 14)


def test_each_expert_has_a_factor_and_an_amax() -> None:
    """Of an expert without rows the amax is 0. Rows of no expert come last on JAX, and are not a number."""
    num, spare = sum(SIZES), 5
    x, w, g = ordinary(0, (num + spare, 40)), ordinary(1, (3, 40, 32)), ordinary(2, (num + spare, 32))
    x[num:], g[num:] = np.nan, np.nan
    factors = {name: np.float32([factor, 1.0, factor * 3]) for name, factor in FACTORS.items()}

    def product(x: jax.Array, w: jax.Array, factors: dict[str, jax.Array]) -> jax.Array:
        low = JaxLow(quantizers=QUANTIZERS, name="w", delayed=NAMES, site=JaxSite(factors=factors))
        return grouped_on_jax(x, w, jnp.asarray(SIZES), 8, low, {})

    y, pull = jax.vjp(jax.jit(product), jnp.asarray(x), jnp.asarray(w), factors)
    *_, of_jax = pull(jnp.asarray(g))
    site = TorchSite(
        factors={name: torch.from_numpy(factor) for name, factor in factors.items()},
        amaxes={name: torch.zeros(3, dtype=torch.int32) for name in factors},
    )
    rows = torch.from_numpy(x[:num].copy()).requires_grad_()
    theirs = grouped_on_torch(
        rows,
        torch.from_numpy(w.swapaxes(1, 2).copy()),
        SIZES,
        TorchLow(quantizers=QUANTIZERS, name="w", delayed=NAMES, site=site),
        {},
    )
    theirs.backward(torch.from_numpy(g[:num].copy()))
    largest = np.abs(theirs.detach().numpy()).max()
    np.testing.assert_allclose(np.asarray(y)[:num], theirs.detach().numpy(), rtol=0, atol=1e-5 * largest)
    of_rows = [slice(0, 9), slice(9, 9), slice(9, 23)]
    for name, array in (("w.input", x), ("w.output_gradient", g)):
        needed = [float(np.abs(array[one]).max(initial=0)) for one in of_rows]
        assert np.asarray(of_jax[name]).tolist() == site.amaxes[name].view(torch.float32).tolist() == needed
    needed = np.abs(w).max((1, 2)).tolist()
    assert np.asarray(of_jax["w.weight"]).tolist() == site.amaxes["w.weight"].view(torch.float32).tolist() == needed
