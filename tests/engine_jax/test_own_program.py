"""Shardings for a user's own pytree, compared with JAX's index of each device's shard."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwright import FindingsError, InputError, Request, load_layout, make_plan, table_of
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax import device_mesh, named_shardings, shapes_of, state_shardings

pytestmark = pytest.mark.devices

TREE = {
    "layers": {"q": np.zeros((3, 64, 4, 16), np.float32), "experts": np.zeros((3, 8, 64, 32), np.float32)},
    "table": np.zeros((96, 64), np.float32),
}
NAMES = {
    "layers/q": "attention: layers embed heads head_dim",
    "layers/experts": "moe: layers experts embed mlp",
    "table": "embedding: vocab embed",
}


def planned(layout: str) -> Plan:
    table = table_of(shapes_of(TREE), NAMES)
    return make_plan(Request(layout=load_layout(layout), table=table, devices=8, batch=8, length=16))


@pytest.mark.parametrize("layout", ["hsdp", "fsdp-tp", "ep-as-cp", "shard-exp-on-fsdp"])
def test_the_shards_of_jax_are_those_of_the_plan(layout: str) -> None:
    plan = planned(layout)
    mesh = device_mesh(plan.mesh)
    placed = jax.device_put(TREE, named_shardings(plan, mesh, TREE))
    for path, array in jax.tree_util.tree_flatten_with_path(placed)[0]:
        row = plan.by_name[jax.tree_util.keystr(path, simple=True, separator="/")]
        assert row.at_rest is not None
        boxes = owned_boxes(row.at_rest, plan.mesh, row.shape)
        held = array.sharding.devices_indices_map(array.shape)
        for device, owned in zip(mesh.devices.flat, boxes, strict=True):
            index = held[device][1:] if row.stack else held[device]
            starts = [along.indices(size)[:2] for along, size in zip(index, row.shape, strict=True)]
            assert [tuple(zip(box.start, box.stop, strict=True)) for box in owned] == [tuple(starts)]


def test_a_leaf_that_was_not_planned() -> None:
    plan = planned("fsdp")
    with pytest.raises(InputError, match=r"^the plan has no weight 'tabel'\. Did you mean 'table'\?$"):
        named_shardings(plan, device_mesh(plan.mesh), {"tabel": np.zeros((96, 64), np.float32)})


def test_a_leaf_of_another_shape() -> None:
    plan = planned("fsdp")
    with pytest.raises(InputError, match=r"^weight 'table' has shape \(48, 64\); it was planned as \(96, 64\)\.$"):
        named_shardings(plan, device_mesh(plan.mesh), {"table": np.zeros((48, 64), np.float32)})


KERNELS = {
    "first": np.zeros((3, 3, 8, 16), np.float32),
    "second": {"one": np.zeros((3, 16, 16), np.float32), "bias": np.zeros((16,), np.float32)},
    "head": np.zeros((16, 8), np.float32),
}
NAMES_OF_KERNELS = {
    "first": "mlp: _height _width embed mlp",
    "second/one": "mlp: _taps mlp embed",
    "second/bias": "mlp: norm",
    "head": "logits: embed vocab",
}


def convolved(kernels, x_BHWC):
    """Convolutions of two dims, then of one, as a user might write them."""
    x_BHWC = jax.nn.silu(
        jax.lax.conv_general_dilated(
            x_BHWC, kernels["first"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    x_BWC = jax.lax.conv_general_dilated(
        x_BHWC.mean(axis=1), kernels["second"]["one"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (x_BWC + kernels["second"]["bias"][None, None]).mean(axis=1) @ kernels["head"]


@pytest.mark.parametrize("layout", ["hsdp", "fsdp-tp"])
def test_kernels_of_convolutions_train_as_on_one_device(layout: str) -> None:
    table = table_of(shapes_of(KERNELS), NAMES_OF_KERNELS)
    sizes = {"data": 2, "fsdp": 4} if layout == "hsdp" else {"data": 1, "fsdp": 4, "tensor": 2}
    plan = make_plan(Request(layout=load_layout(layout), table=table, mesh_sizes=sizes, batch=8, length=1))
    first = {"hsdp": "_height _width embed/fsdp mlp", "fsdp-tp": "_height _width embed/fsdp mlp/tensor"}
    assert str(plan.by_name["first"].at_rest) == first[layout]

    draw = np.random.default_rng(4)
    kernels = jax.tree.map(lambda one: draw.normal(size=one.shape).astype(np.float32) / 4, KERNELS)
    x_BHWC, y_BV = (draw.normal(size=shape).astype(np.float32) for shape in ((8, 5, 6, 8), (8, 8)))

    def step(kernels):
        loss, gradients = jax.value_and_grad(lambda k: ((convolved(k, x_BHWC) - y_BV) ** 2).mean())(kernels)
        return loss, jax.tree.map(lambda one, gradient: one - 0.1 * gradient, kernels, gradients)

    mesh = device_mesh(plan.mesh)
    shardings = named_shardings(plan, mesh, kernels)
    placed, alone = jax.device_put(kernels, shardings), kernels
    on_mesh = jax.jit(step, in_shardings=(shardings,), out_shardings=(None, shardings))
    for _ in range(2):
        loss, placed = on_mesh(placed)
        expected, alone = jax.jit(step)(alone)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for one, same in zip(jax.tree.leaves(placed), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-6)
    shapes = {key: placed[key].addressable_shards[0].data.shape for key in ("first", "head")}
    assert shapes["first"] == ((3, 3, 2, 16) if layout == "hsdp" else (3, 3, 2, 8))


def test_a_plan_with_errors_has_no_shardings() -> None:
    table = table_of(shapes_of(TREE), NAMES)
    request = Request(layout=load_layout("tp"), table=table, mesh_sizes={"tensor": 8}, batch=8, length=16)
    plan = make_plan(request)
    with pytest.raises(FindingsError) as caught:
        named_shardings(plan, device_mesh(plan.mesh), TREE)
    assert caught.value.findings == plan.errors
    assert {finding.code for finding in plan.errors} == {"SW107"}


def test_a_plan_of_another_engine_or_mesh() -> None:
    plan = planned("fsdp")
    other = make_plan(replace(plan.request, engine="torch"))
    mesh = device_mesh(plan.mesh)
    with pytest.raises(InputError) as caught:
        named_shardings(other, mesh, TREE)
    assert str(caught.value) == (
        "the plan is for 'torch', which shards other dims of the weights at rest. Make it from a Request with engine='jax'."
    )
    with pytest.raises(InputError) as caught:
        named_shardings(plan, device_mesh(Mesh.of(data=2, fsdp=4)), TREE)
    assert str(caught.value) == (
        "the mesh is data 2 x fsdp 4, and the plan is for data 1 x fsdp 8. Make it from the plan: device_mesh(plan.mesh)."
    )


OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam,
    "lamb": optax.lamb,
    "adafactor": lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8),
    "novograd": optax.novograd,
    "sm3": optax.sm3,
    "schedule-free": optax.contrib.schedule_free_adamw,
    "accumulated": lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(),
    "clipped, with a mask": lambda rate: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(rate), lambda tree: jax.tree.map(lambda w: w.ndim > 2, tree)),
    ),
    "of parts": lambda rate: optax.partition(
        {"matrix": optax.adam(rate), "other": optax.lion(rate)},
        lambda tree: {**jax.tree.map(lambda _: "matrix", tree), "table": "other"},
    ),
    "ademamix": optax.contrib.ademamix,
}


MORE = ("ademamix", "novograd", "lamb", "schedule-free", "sm3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in MORE else name for name in OPTIMIZERS]
)
def test_what_an_optimizer_keeps_of_a_weight_has_its_sharding(name: str) -> None:
    """And a step on the mesh gives the numbers of one device."""
    layout = random.Random(name).choice(["hsdp", "fsdp-tp", "ep-as-cp"])
    plan = planned(layout)
    mesh = device_mesh(plan.mesh)
    draw = np.random.default_rng(5)
    weights = jax.tree.map(lambda one: draw.normal(size=one.shape).astype(np.float32), TREE)
    optimizer = OPTIMIZERS[name](0.1)
    alone = optimizer.init(weights)
    of_weights, of_state = named_shardings(plan, mesh, weights), state_shardings(plan, mesh, alone)
    assert jax.tree.structure(of_state) == jax.tree.structure(alone)
    by_name = dict(zip(shapes_of(TREE), jax.tree.leaves(of_weights), strict=True))
    kept = 0
    for (path, leaf), found in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(of_state), strict=True):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        owner = next(
            (key for key, (shape, _) in shapes_of(TREE).items() if text.endswith(key) and shape == leaf.shape), None
        )
        kept += owner is not None
        assert found == (by_name[owner] if owner else NamedSharding(mesh, PartitionSpec()))
    assert kept >= (0 if name == "adafactor" else 1)

    def step(weights, state):
        changes, state = optimizer.update(jax.tree.map(jnp.sin, weights), state, weights)
        return optax.apply_updates(weights, changes), state

    on_mesh = jax.jit(step, in_shardings=(of_weights, of_state), out_shardings=(of_weights, of_state))
    placed, state = jax.device_put(weights, of_weights), jax.device_put(alone, of_state)
    for _ in range(2):
        placed, state = on_mesh(placed, state)
        weights, alone = jax.jit(step)(weights, alone)
    for one, same in zip(jax.tree.leaves((placed, state)), jax.tree.leaves((weights, alone)), strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-5)


def test_a_large_leaf_of_no_weight_is_refused() -> None:
    plan = planned("fsdp")
    state = {"0": {"momentum": np.zeros(4096, np.float32)}, "count": np.int32(0)}
    with pytest.raises(InputError) as caught:
        state_shardings(plan, device_mesh(plan.mesh), state)
    assert str(caught.value) == (
        "'0/momentum' has shape (4096,), and no weight's path is a part of its own: how it is to be sharded cannot be known. Make the "
        "state from the tree of weights that was planned, or give this leaf a sharding of your own."
    )


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jax.nn.gelu, "'act' is the function 'gelu'"),
        (0.5, "'act' is the value 0.5"),
        (jax.random.key(0), "'act' is a key of a random generator"),
    ],
    ids=["function", "number", "key"],
)
def test_leaves_that_are_no_weights(leaf: Any, text: str) -> None:
    advice = (
        ", and 1 more such leaves: only arrays are sharded by a plan. Give the tree of the weights alone, as eqx.filter(model, "
        "eqx.is_inexact_array) of equinox and nnx.state(model, nnx.Param) of flax."
    )
    with pytest.raises(InputError) as caught:
        shapes_of({**TREE, "act": leaf, "last": leaf})
    assert str(caught.value) == text + advice
    plan = planned("fsdp")
    with pytest.raises(InputError) as caught:
        named_shardings(plan, device_mesh(plan.mesh), {**TREE, "act": leaf, "last": leaf})
    assert str(caught.value) == text + advice
