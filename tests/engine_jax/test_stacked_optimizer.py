"""Optimizers of optax on weights with layers in a stack: the numbers that optax has for a tree with each layer as a weight of its own."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.findings.errors import InputError
from shardwright.engine_jax.training.elementwise import treats_stacks_as_layers
from shardwright.engine_jax.training.named_optimizer import changed, described, initial

SHAPES = {"embed": (10, 8), "layers.norm": (3, 8), "layers.up": (3, 8, 4), "others.up": (2, 8, 4), "scale": (8,)}
STACKED = ("layers.norm", "layers.up", "others.up")
SPECS = {
    "embed": PartitionSpec("fsdp"),
    "layers.norm": PartitionSpec(),
    "layers.up": PartitionSpec(None, "fsdp"),
    "others.up": PartitionSpec(None, None, "fsdp"),
    "scale": PartitionSpec("fsdp"),
}
COVERING = ("adafactor", "contrib.prodigy", "lamb", "novograd", "radam", "sm3")
"""Norms of a weight, means of its update, a scalar and a vector of each weight, norms of all weights, and none."""
RATE = 0.1


def parameters(one: object) -> frozenset[str]:
    return frozenset(inspect.signature(one).parameters) if inspect.isfunction(one) else frozenset()


NAMES = [
    prefix + name
    for prefix, module in (("", optax), ("contrib.", optax.contrib))
    for name in dir(module)
    if not name.startswith("_") and "learning_rate" in parameters(getattr(module, name))
]
assert len(NAMES) > 40


def drawn(seed: int, name: str) -> dict[str, np.ndarray]:
    """Layers of very different sizes, so that one norm for all of them would be seen."""
    rng = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
    arrays = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    for key in STACKED:
        arrays[key] *= (10.0 ** rng.integers(-2, 3, SHAPES[key][0])).reshape(-1, *[1] * (len(SHAPES[key]) - 1))
    return {key: array.astype(np.float32) for key, array in arrays.items()}


def unstacked(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {key: [jnp.asarray(one) for one in array] if key in STACKED else array for key, array in arrays.items()}


def of_optax(name: str, steps: int) -> dict[str, np.ndarray]:
    module, _, short = name.rpartition(".")
    made = getattr({"": optax, "contrib": optax.contrib}[module], short)
    own = {"weight_decay": 0.0} if "weight_decay" in parameters(made) else {}
    transformation = made(learning_rate=RATE, **own)
    weights = unstacked(drawn(100, name))
    state = transformation.init(weights)
    update = jax.jit(transformation.update)
    for step in range(steps):
        changes, state = update(unstacked(drawn(step, name)), state, weights)
        weights = optax.apply_updates(weights, changes)
    return {key: np.stack(value) if key in STACKED else np.asarray(value) for key, value in weights.items()}


def of_ours(name: str, steps: int) -> dict[str, np.ndarray]:
    """Sharded over four devices."""
    optimizer = described(name, {}, SHAPES, STACKED)
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items() if key != "embed"}
    places["embed"] = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    weights: Any = jax.device_put(drawn(100, name), places)
    kept, shared = jax.jit(lambda w: initial(optimizer, w, STACKED))(weights)
    assert {key: (array.shape, str(array.dtype)) for key, array in shared.items()} == optimizer.shared
    for one in optimizer.kept:
        assert {key: array.shape for key, array in kept[one.prefix].items()} == {
            key: shape for key, shape in SHAPES.items() if one.weights is None or key in one.weights
        }
    step = jax.jit(lambda g, k, s, w: changed(optimizer, g, k, s, w, jnp.float32(RATE), STACKED))
    for number in range(steps):
        changes, kept, shared = step(jax.device_put(drawn(number, name), places), kept, shared, weights)
        weights = jax.tree.map(jnp.add, weights, changes)
    return {key: np.asarray(array) for key, array in weights.items()}


def compare(name: str) -> None:
    try:
        ours = of_ours(name, 3)
    except InputError:
        assert name not in COVERING
        return
    theirs = of_optax(name, 3)
    for key, array in theirs.items():
        scale = np.abs(array).max(axis=tuple(range(1, array.ndim)) if key in STACKED else None, keepdims=True)
        np.testing.assert_allclose(ours[key] / scale, array / scale, rtol=0, atol=2e-5, err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", COVERING)
def test_a_stack_is_as_its_layers(name: str) -> None:
    compare(name)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Specifying a key will be required:UserWarning")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in COVERING])
def test_every_optimizer_of_optax(name: str) -> None:
    compare(name)


@pytest.mark.parametrize("name", ["adamw", "lion", "radam", "contrib.ademamix", "contrib.schedule_free_sgd", "yogi"])
def test_what_computes_element_by_element_gets_stacks(name: str) -> None:
    """So its program does not grow with the number of layers."""
    optimizer = described(name, {}, SHAPES, STACKED)
    weights = {key: jnp.asarray(array) for key, array in drawn(0, name).items()}
    kept, shared = initial(optimizer, weights, STACKED)
    text = str(jax.make_jaxpr(lambda: changed(optimizer, weights, kept, shared, weights, jnp.float32(1), STACKED))())
    assert "concatenate" not in text


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda x: 2 * x + jnp.sqrt(jnp.abs(x)), True),
        (lambda x: jnp.where(x > 0, x, -0.5), True),
        (lambda x: x / (1 + jnp.float32(3) ** 2), True),
        (lambda x: jax.jit(jnp.tanh)(x), True),
        (lambda x: jnp.full(x.shape, 2.0), True),
        (lambda x: x / jnp.linalg.norm(x), False),
        (lambda x: x - x.mean(axis=-1, keepdims=True), False),
        (lambda x: x / x.size, False),
        (lambda x: -x if x.ndim == 2 else x, False),
        (lambda x: x * x.shape[0], False),
        (lambda x: x[::-1], False),
        (lambda x: jnp.cumsum(x, axis=0), False),
        (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), False),
        (lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), False),
        (lambda x: x + np.linspace(0, 1, x.shape[-1], dtype=np.float32).reshape((1,) * (x.ndim - 1) + (-1,)), False),
        (lambda x: jnp.sort(x), False),
        (lambda x: jax.lax.while_loop(lambda y: jnp.max(y) < 3, lambda y: 2 * y, x), False),
    ],
)
def test_which_functions_treat_a_stack_as_its_layers(function: Callable[[jax.Array], jax.Array], same: bool) -> None:
    stack, layer = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 3, 4), (3, 4)))
    assert treats_stacks_as_layers(function, (stack,), (layer,)) is same
