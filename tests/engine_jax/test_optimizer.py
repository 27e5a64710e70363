"""AdamW, clipping and the learning rate, compared with PyTorch's and with the published formulas."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from shardwright.core.model.optimizer import FIRST, SECOND
from shardwright.engine_jax.training.optimizer import OF_ARRAYS, apply_gradients
from shardwright.engine_jax.training.state import State
from shardwright.training.optimizer import OptimizerOptions, learning_rate

SHAPES = {"matrix": (5, 4), "scale": (4,)}
LR, DECAY, CLIP = 3e-2, 0.2, 0.7
BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Gradients with norms far above and far below the bound of clipping."""
    rng = np.random.default_rng(step)
    return {name: (10.0 ** -(step % 3) * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def start(dtype: str = "float32", moments: str = "float32") -> State:
    rng = np.random.default_rng(100)
    weights = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    zeros = {name: jnp.zeros(shape, moments) for name, shape in SHAPES.items()}
    kept = {FIRST: zeros, SECOND: zeros}
    return State(weights=weights, buffers={"bias": jnp.ones(3)}, kept=kept, shared={}, step=jnp.int32(0))


def options(**changes: float) -> OptimizerOptions:
    values = {"lr": LR, "warmup": 0, "steps": 1, "weight_decay": DECAY, "clip": CLIP, **changes}
    return OptimizerOptions(**values)  # pyright: ignore[reportArgumentType]


def test_steps_are_those_of_pytorch() -> None:
    state = start()
    theirs = {name: torch.nn.Parameter(torch.tensor(np.asarray(array))) for name, array in state.weights.items()}
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": DECAY},
        {"params": [theirs["scale"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(BETA_1, BETA_2), eps=EPSILON)
    rates, clipped = [], []
    for step in range(8):
        gradients = gradients_of(step)
        state, norm = apply_gradients(
            state,
            {name: jnp.asarray(array) for name, array in gradients.items()},
            options(warmup=3, steps=8),
            frozenset({"matrix"}),
        )
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[name])
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), CLIP).item()
        rate = LR * (step + 1) / 3 if step < 3 else LR * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 5)) / 2)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        rates.append(rate)
        clipped.append(their_norm > CLIP)
        assert float(norm) == pytest.approx(their_norm, rel=1e-6)
        for name, array in state.weights.items():
            np.testing.assert_allclose(array, theirs[name].detach().numpy(), rtol=0, atol=1e-6)
    assert int(state.step) == 8
    assert set(clipped) == {True, False}
    assert rates[2] == LR
    assert rates[-1] == pytest.approx(LR / 10)
    np.testing.assert_array_equal(state.buffers["bias"], np.ones(3))


@pytest.mark.parametrize("warmup", [0, 1, 4, 10, 13])
def test_the_rate_is_the_schedule_of_optax_in_numbers_and_in_arrays(warmup: int) -> None:
    theirs = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else LR,
        peak_value=LR,
        warmup_steps=warmup,
        decay_steps=max(10, warmup + 1),
        end_value=LR / 10,
    )
    first = 1 if warmup else 0
    expected = [float(theirs(step + first)) for step in range(20)]
    ours = options(warmup=warmup, steps=10)
    assert [learning_rate(ours, step) for step in range(20)] == pytest.approx(expected, rel=1e-6)
    in_arrays = [float(learning_rate(ours, jnp.int32(step), OF_ARRAYS)) for step in range(20)]
    assert in_arrays == pytest.approx(expected, rel=1e-6)


def test_no_gradient_below_the_bound_is_clipped_and_no_weight_decays_without_decay() -> None:
    state = start()
    huge = {name: jnp.full(shape, 1e3) for name, shape in SHAPES.items()}
    after, _ = apply_gradients(state, huge, options(clip=1e9, weight_decay=0.0), frozenset(SHAPES))
    for name in SHAPES:
        np.testing.assert_allclose(after.first[name], 1e3 * (1 - BETA_1), rtol=1e-6)
        np.testing.assert_allclose(after.weights[name], state.weights[name] - LR, rtol=0, atol=1e-6)


def test_with_gradients_of_zero_only_the_decay_changes_weights() -> None:
    state = start()
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    after, norm = apply_gradients(state, zeros, options(), frozenset({"matrix"}))
    assert float(norm) == 0.0
    np.testing.assert_array_equal(after.weights["scale"], state.weights["scale"])
    np.testing.assert_allclose(after.weights["matrix"], state.weights["matrix"] * (1 - LR * DECAY), rtol=1e-6)


def test_narrow_weights_and_moments_stay_narrow_and_are_computed_wide() -> None:
    narrow = start("bfloat16", "bfloat16")
    wide = narrow._replace(
        weights={name: array.astype(jnp.float32) for name, array in narrow.weights.items()},
        kept={
            prefix: {name: array.astype(jnp.float32) for name, array in arrays.items()}
            for prefix, arrays in narrow.kept.items()
        },
    )
    gradients = {name: jnp.asarray(array) for name, array in gradients_of(0).items()}
    ours, our_norm = apply_gradients(narrow, gradients, options(), frozenset({"matrix"}))
    theirs, their_norm = apply_gradients(wide, gradients, options(), frozenset({"matrix"}))
    assert float(our_norm) == float(their_norm)
    for name in SHAPES:
        for held in ("weights", "first", "second"):
            array = getattr(ours, held)[name]
            assert array.dtype == jnp.bfloat16
            np.testing.assert_array_equal(array, getattr(theirs, held)[name].astype(jnp.bfloat16))
