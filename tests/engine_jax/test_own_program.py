"""Shardings for a pytree that is not ours, against what JAX says each device holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright import InputError, Request, load_layout, make_plan, table_of
from shardwright.core.boxes import owned_boxes
from shardwright.core.plan import Plan
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
def test_jax_holds_what_the_plan_says(layout: str) -> None:
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
            starts = [part.indices(size)[:2] for part, size in zip(index, row.shape, strict=True)]
            assert [tuple(zip(box.start, box.stop, strict=True)) for box in owned] == [tuple(starts)]


def test_a_leaf_that_was_not_planned() -> None:
    plan = planned("fsdp")
    with pytest.raises(InputError, match=r"^the plan has no weight 'tabel'\. Did you mean 'table'\?$"):
        named_shardings(plan, device_mesh(plan.mesh), {"tabel": np.zeros((96, 64), np.float32)})


def test_a_leaf_of_another_shape() -> None:
    plan = planned("fsdp")
    with pytest.raises(InputError, match=r"^weight 'table' has shape \(48, 64\); it was planned as \(96, 64\)\.$"):
        named_shardings(plan, device_mesh(plan.mesh), {"table": np.zeros((48, 64), np.float32)})
