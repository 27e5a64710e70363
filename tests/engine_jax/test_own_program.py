"""Shardings for a user's own pytree, compared with JAX's index of each device's shard."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from shardwright import FindingsError, InputError, Request, load_layout, make_plan, table_of
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax import device_mesh, named_shardings, shapes_of

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
