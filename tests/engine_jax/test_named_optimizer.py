"""Optimizers of optax by their names there: state by evaluated shapes, and the numbers of optax on one device and on four."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import Kept
from shardwright.engine_jax.training.named_optimizer import changed, described, initial

SHAPES = {"matrix": (8, 4), "scale": (4,)}
OURS = "Give one that both engines have: adadelta, adagrad, adamax, adamw, lion, rmsprop, sgd."


def drawn(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_state_has_the_names_of_optax_and_the_shapes_of_weights() -> None:
    found = described("lamb", {"b1": "0.8"}, SHAPES)
    assert found.name == "optax:lamb"
    assert found.constants == {"b1": 0.8}
    assert found.kept == (
        Kept(prefix="optimizer/0.mu/", dtype="float32"),
        Kept(prefix="optimizer/0.nu/", dtype="float32"),
    )
    assert found.shared == {"optimizer/0.count": ((), "int32")}


def test_only_some_weights_have_some_state() -> None:
    """Muon is for matrices; the others have Adam's moments."""
    found = described("contrib.muon", {}, SHAPES)
    assert {frozenset({"matrix"}), frozenset({"scale"})} == {one.weights for one in found.kept}
    assert found.shared["optimizer/inner_states.muon.inner_state.0.ns_coeffs"] == ((3,), "float32")


def test_lamb_on_a_sharded_weight_is_that_of_optax() -> None:
    """The norm of a weight is of all its shards."""
    optimizer = described("lamb", {}, SHAPES)
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    places = {"matrix": NamedSharding(mesh, PartitionSpec("fsdp")), "scale": NamedSharding(mesh, PartitionSpec())}
    ours: Any = {name: jax.device_put(array, places[name]) for name, array in drawn(100).items()}
    theirs: Any = drawn(100)
    kept, shared = initial(optimizer, ours)
    made = optax.lamb(learning_rate=0.1)
    state = made.init(theirs)
    step = jax.jit(lambda g, k, s, w, rate: changed(optimizer, g, k, s, w, rate))
    update = jax.jit(made.update)
    for number in range(3):
        changes, kept, shared = step(drawn(number), kept, shared, ours, jnp.float32(0.1))
        ours = {name: ours[name] + changes[name] for name in ours}
        other, state = update(drawn(number), state, theirs)
        theirs = {name: theirs[name] + np.asarray(other[name]) for name in theirs}
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert int(shared["optimizer/0.count"]) == 3


def test_state_that_is_not_zero_before_the_first_step() -> None:
    optimizer = described("adagrad", {"initial_accumulator_value": "0.25"}, SHAPES)
    (kept,) = initial(optimizer, {name: jnp.asarray(array) for name, array in drawn(0).items()})[0].values()
    assert {float(value) for array in kept.values() for value in np.unique(array)} == {0.25}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lamp", {}, "--optimizer: optax has no optimizer 'lamp'. Did you mean 'optax:lamb'?"),
        ("zzz", {}, "--optimizer: optax has no optimizer 'zzz'. Names are those of optax's documentation."),
        ("os.system", {}, "--optimizer: optax has no optimizer 'os.system'."),
        ("lamb", {"beta": "1"}, "--optimizer-set: optax:lamb has no constant 'beta'."),
        ("lamb", {"b1": "x"}, "--optimizer-set: b1 is 'x', and must be a number, true, false, none, or numbers"),
        (
            "lamb",
            {"learning_rate": "1"},
            "learning_rate of optax:lamb cannot be set here. It is --lr, with its schedule.",
        ),
        (
            "lamb",
            {"weight_decay": "1"},
            "weight_decay of optax:lamb cannot be set here. It is --weight-decay, decoupled",
        ),
        (
            "adafactor",
            {"min_dim_size_to_factor": "2"},
            "its state '0.v_row.matrix' has shape (4,), and its weight (8, 4).",
        ),
        ("noisy_sgd", {"key": "0"}, "its state '0.rng_key' has dtype key<fry>, which no checkpoint holds."),
        ("noisy_sgd", {"eta": "x/y"}, "--optimizer-set: eta is 'x/y', and must be a number"),
        (
            "contrib.dadapt_adamw",
            {"betas": "2"},
            "it cannot be made of these constants, or needs more than gradients and",
        ),
        ("lbfgs", {}, "--optimizer optax:lbfgs"),
        ("rprop", {}, "its state begins with the learning rate, which the schedule of a run changes in each step."),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        described(name, settings, SHAPES)
    assert message in str(refused.value)
    assert "Traceback" not in str(refused.value)
    if "has no" not in str(refused.value) and "--optimizer-set" not in str(refused.value):
        assert str(refused.value).endswith(OURS)
