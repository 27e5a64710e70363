"""Each optimizer of the table on both engines: the numbers of optax and of ``torch.optim``; and the average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import ADAMW, AVERAGE, Optimizer
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.named_optimizer import described
from shardwright.engine_jax.training.optimizer import OF_ARRAYS as OF_JAX
from shardwright.engine_jax.training.optimizer import apply_gradients as apply_on_jax
from shardwright.engine_jax.training.state import State, abstract_state
from shardwright.engine_torch.training.optimizer import OF_TENSORS
from shardwright.engine_torch.training.optimizer import apply_gradients as apply_on_torch
from shardwright.training.arithmetic import PLAIN
from shardwright.training.optimizer import OptimizerOptions, average_share, learning_rate
from shardwright.training.optimizers import OPTIMIZERS, optimizer_of
from tests.engine_jax.steps import Case, compile_plan, plan_of
from tests.matrix import rest

SHAPES = {"matrix": (40, 30), "scale": (30,)}
STEPS, DECAY, AVERAGED = 5, 0.2, 0.6
OPTIONS = OptimizerOptions(lr=3e-2, warmup=2, steps=STEPS, weight_decay=DECAY, clip=1e9)

IN_OPTAX: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"weight_decay": 0.0},
    "lion": {"weight_decay": 0.0},
    "adagrad": {"initial_accumulator_value": 0.0},
    "rmsprop": {"eps_in_sqrt": False},
}
"""What optax must be given besides the constants, which have their names there, to compute the same formula."""

IN_TORCH: Mapping[str, tuple[str, Mapping[str, str | tuple[str, str]]]] = {
    "adamw": ("AdamW", {"betas": ("b1", "b2"), "eps": "eps"}),
    "sgd": ("SGD", {"momentum": "momentum", "nesterov": "nesterov"}),
    "adagrad": ("Adagrad", {"eps": "eps"}),
    "rmsprop": ("RMSprop", {"alpha": "decay", "eps": "eps"}),
    "adamax": ("Adamax", {"betas": ("b1", "b2"), "eps": "eps"}),
    "adadelta": ("Adadelta", {"rho": "rho", "eps": "eps"}),
}
"""The class, and of its constants ours. PyTorch has no Lion."""

CASES: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("adamw", {"b1": "0.8", "b2": "0.7", "eps": "1e-3"}),
    ("sgd", {"momentum": "0.7", "nesterov": "true"}),
    ("sgd", {"momentum": "0"}),
    ("lion", {"b1": "0.5", "b2": "0.8"}),
    ("adagrad", {"eps": "1e-2"}),
    ("rmsprop", {"decay": "0.6", "eps": "1e-2"}),
    ("adamax", {"b1": "0.8", "b2": "0.7", "eps": "1e-2"}),
    ("adadelta", {"rho": "0.6", "eps": "1e-2"}),
]


def drawn(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def on_jax(optimizer: Optimizer, average: float | None = None) -> list[State]:
    """The states after each step, on JAX."""
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    prefixes = [one.prefix for one in optimizer.kept] + ([] if average is None else [AVERAGE.prefix])
    weights = {name: jnp.asarray(array) for name, array in drawn(100).items()}
    state = State(weights=weights, buffers={}, kept=dict.fromkeys(prefixes, zeros), shared={}, step=jnp.int32(0))
    step = jax.jit(
        partial(apply_on_jax, options=OPTIONS, decayed=frozenset({"matrix"}), optimizer=optimizer, average=average)
    )
    states = []
    for number in range(STEPS):
        state, _ = step(state, drawn(number))
        states.append(state)
    return states


def on_torch(optimizer: Optimizer, average: float | None = None) -> tuple[list[dict[str, np.ndarray]], Any]:
    """The weights after each step, and what is kept after the last, on PyTorch."""
    weights = {name: torch.from_numpy(array) for name, array in drawn(100).items()}
    prefixes = [one.prefix for one in optimizer.kept] + ([] if average is None else [AVERAGE.prefix])
    kept = {prefix: {name: torch.zeros(shape) for name, shape in SHAPES.items()} for prefix in prefixes}
    found = []
    for number in range(STEPS):
        gradients = {name: torch.from_numpy(array) for name, array in drawn(number).items()}
        apply_on_torch(
            weights,
            gradients,
            kept,
            step=number,
            norm=torch.tensor(1.0),
            options=OPTIONS,
            decayed={"matrix"},
            optimizer=optimizer,
            average=average,
        )
        found.append({name: array.numpy().copy() for name, array in weights.items()})
    return found, kept


def decayed(name: str, weight: np.ndarray, rate: float) -> np.ndarray:
    return weight * np.float32(1 - rate * DECAY) if name == "matrix" else weight


def of_optax(name: str, optimizer: Optimizer) -> dict[str, np.ndarray]:
    weights: dict[str, Any] = drawn(100)
    constants = dict(optimizer.constants)
    theirs = getattr(optax, name)(learning_rate=1.0, **constants, **IN_OPTAX.get(name, {}))
    state, update = theirs.init(weights), jax.jit(theirs.update)
    for number in range(STEPS):
        changes, state = update(drawn(number), state, weights)
        rate = learning_rate(OPTIONS, number)
        weights = {name: decayed(name, w, rate) + rate * np.asarray(changes[name]) for name, w in weights.items()}
    return weights


def of_torch(name: str, optimizer: Optimizer) -> dict[str, np.ndarray]:
    weights = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in drawn(100).items()}
    made, names = IN_TORCH[name]
    constants = {
        theirs: tuple(optimizer.constants[one] for one in ours)
        if isinstance(ours, tuple)
        else optimizer.constants[ours]
        for theirs, ours in names.items()
    }
    theirs = getattr(torch.optim, made)(weights.values(), lr=1.0, weight_decay=0.0, **constants)
    for number in range(STEPS):
        rate = learning_rate(OPTIONS, number)
        for group in theirs.param_groups:
            group["lr"] = rate
        for key, gradient in drawn(number).items():
            weights[key].grad = torch.from_numpy(gradient)
            weights[key].data = torch.from_numpy(decayed(key, weights[key].detach().numpy(), rate))
        theirs.step()
    return {key: weight.detach().numpy() for key, weight in weights.items()}


@pytest.mark.parametrize(
    ("name", "settings"), [*CASES[: len(OPTIMIZERS)], *(rest(*case) for case in CASES[len(OPTIMIZERS) :])]
)
def test_the_numbers_are_those_of_optax_and_of_torch(name: str, settings: dict[str, str]) -> None:
    optimizer = optimizer_of(name, settings)
    ours = on_jax(optimizer)[-1].weights
    on_other, _ = on_torch(optimizer)
    oracles = [of_torch(name, optimizer)] if name in IN_TORCH else []
    # The eps of optax's Adagrad is inside the root: only where it is tiny are both one formula.
    if name != "adagrad" or not settings:
        oracles.append(of_optax(name, optimizer))
    for key, start in drawn(100).items():
        moved = np.abs(ours[key] - start).max()
        # Adadelta's first steps are small: the tolerance is of what a run moved.
        for theirs in (*(oracle[key] for oracle in oracles), on_other[-1][key]):
            np.testing.assert_allclose(ours[key], theirs, rtol=1e-6, atol=1e-5 * moved)


def test_an_average_is_the_weighted_mean_of_the_weights_after_each_step() -> None:
    optimizer = optimizer_of("sgd", {})
    states = on_jax(optimizer, AVERAGED)
    on_other, kept = on_torch(optimizer, AVERAGED)
    for last in (1, 2, STEPS):
        shares = AVERAGED ** np.arange(last - 1, -1, -1, dtype=np.float64)
        for name in SHAPES:
            weights = np.stack([np.asarray(state.weights[name], np.float64) for state in states[:last]])
            mean = np.tensordot(shares / shares.sum(), weights, axes=1)
            np.testing.assert_allclose(states[last - 1].kept[AVERAGE.prefix][name], mean, rtol=2e-6, atol=1e-7)
    for name in SHAPES:
        weights = np.stack([each[name].astype(np.float64) for each in on_other])
        mean = np.tensordot(shares / shares.sum(), weights, axes=1)
        np.testing.assert_allclose(kept[AVERAGE.prefix][name], mean, rtol=2e-6, atol=1e-7)


SMALL = Case(model="llama3-test", layout="fsdp", mesh="fsdp=4", settings="num_layers=1,embed=64,mlp=96,vocab=300")


def plan_with(optimizer: Optimizer, **changed: Any) -> Plan:
    return make_plan(replace(plan_of(SMALL).request, optimizer=optimizer, average=AVERAGED, **changed))


@pytest.mark.parametrize("name", ["lion", "optax:lamb"])
def test_a_device_holds_the_bytes_of_the_plan(name: str) -> None:
    library, _, short = name.rpartition(":")
    shapes = {w.name: w.stacked_shape for w in plan_of(SMALL).weights}
    own = described(short, {}, shapes) if library else optimizer_of(name, {})
    plan = plan_with(own, **({} if library else {"moments_dtype": "bfloat16"}))
    state = abstract_state(plan, device_mesh(plan.mesh))
    held = sum(prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in jax.tree.leaves(state))
    assert held - 4 * (1 + len(own.shared)) == plan.memory.state_bytes
    kept = sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(state.kept))
    assert 0 < plan.memory.optimizer_bytes + plan.memory.average_bytes <= kept


@pytest.mark.matrix
def test_a_compiled_step_writes_all_that_is_kept_where_it_was() -> None:
    plan = plan_with(optimizer_of("adamax", {}))
    memory: Any = compile_plan(plan).memory_analysis()
    # The state with the number of steps is the argument that is donated.
    assert memory.alias_size_in_bytes == plan.memory.state_bytes + 4


@pytest.mark.parametrize("average", [0.5, 0.999, 0.999999])
def test_the_first_step_of_an_average_is_all_of_the_weights_also_in_float32(average: float) -> None:
    """1 - 0.999999 has two correct digits in float32."""
    for count in (1, 2, 1000, 1_000_000):
        exact = (1 - average) / (1 - average**count)
        assert average_share(average, count) == pytest.approx(exact, rel=1e-9)
        assert float(average_share(average, jnp.float32(count), OF_JAX)) == pytest.approx(exact, rel=1e-5)
        assert float(average_share(average, torch.tensor(float(count)), OF_TENSORS)) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("name", ["cos", "root", "sign", "exp_less_one"])
def test_functions_are_the_same_for_numbers_and_for_arrays(name: str) -> None:
    for number in (0.3, 2.0, *(() if name == "root" else (-0.5, 0.0))):
        expected = getattr(PLAIN, name)(number)
        assert float(getattr(OF_JAX, name)(jnp.float32(number))) == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert float(getattr(OF_TENSORS, name)(torch.tensor(number))) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_what_is_kept() -> None:
    kept = {name: [one.prefix for one in optimizer_of(name, {}).kept] for name in OPTIMIZERS}
    assert kept == {
        "adamw": ["moments.first/", "moments.second/"],
        "sgd": ["optimizer/momentum/"],
        "lion": ["optimizer/momentum/"],
        "adagrad": ["optimizer/squares/"],
        "rmsprop": ["optimizer/squares/"],
        "adamax": ["optimizer/momentum/", "optimizer/largest/"],
        "adadelta": ["optimizer/squares/", "optimizer/changes/"],
    }
    assert optimizer_of("sgd", {"momentum": "0"}).kept == ()
    assert optimizer_of("adamw", {"eps": "1e-8"}) == ADAMW


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "adamv",
            {},
            "--optimizer: there is no optimizer 'adamv'. Did you mean 'adamw'? An engine's own is optax:NAME or torch:NAME.",
        ),
        (
            "muon",
            {},
            "--optimizer: 'muon' is not run: it multiplies the entire matrix of a weight with itself: optax takes it for weights of two dims, so for "
            "embedding and logits too, and Adam for those of attention, which have three, torch.optim takes no weight of another number of "
            "dims. Give one that both engines have: adadelta, adagrad, adamax, adamw, lion, rmsprop, sgd.",
        ),
        ("lion", {"beta": "0.5"}, "--optimizer-set: 'lion' has no constant 'beta'. Known: b1, b2."),
        (
            "lion",
            {"b1": "1"},
            "--optimizer-set: b1 is '1', and must be a number of at least 0 and below 1, as 0.9.",
        ),
        (
            "lion",
            {"b1": "nan"},
            "--optimizer-set: b1 is 'nan', and must be a number of at least 0 and below 1, as 0.9.",
        ),
        ("adagrad", {"eps": "0"}, "--optimizer-set: eps is '0', and must be a finite number above 0, as 1e-10."),
        ("adagrad", {"eps": "inf"}, "--optimizer-set: eps is 'inf', and must be a finite number above 0, as 1e-10."),
        ("sgd", {"nesterov": "1"}, "--optimizer-set: nesterov is '1', and must be true or false, as false."),
        (
            "sgd",
            {"nesterov": "true", "momentum": "0"},
            "--optimizer-set: nesterov is true, and momentum is 0. Give a momentum above 0, as momentum=0.9.",
        ),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        optimizer_of(name, settings)
    assert str(refused.value) == message
