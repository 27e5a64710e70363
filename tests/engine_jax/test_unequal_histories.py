"""Of a run on devices: weights and amaxes that differ on one device are refused."""

from __future__ import annotations

import jax
import pytest

from shardwright.checkpoint import CheckpointError
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import delayed_boxes, weight_replicas
from shardwright.engine_jax.training.state import initial_state
from shardwright.runs.processes.group import Alone
from shardwright.runs.processes.replicas import require_equal, unequal_weights
from tests.engine_jax.steps import Case, plan_of

CASE = Case(model="mixtral-test", layout="ep", mesh="fsdp=2,expert=2", precision="fp8-delayed amax_history_len=4")
NAME = "delayed.factor/layers.moe.down.input"


def test_a_factor_that_differs_on_one_device_is_named() -> None:
    plan = plan_of(CASE)
    state = initial_state(plan, device_mesh(plan.mesh), 0)
    assert len(list(delayed_boxes(state))) == 4 * len(plan.delayed_tensors)
    require_equal(delayed_boxes(state), Alone(), 3)

    right = state.delayed[NAME]
    shards = [shard.data for shard in right.addressable_shards]
    shards[3] = jax.device_put(shards[3].at[1, 2].set(0.25), shards[3].device)
    wrong = jax.make_array_from_single_device_arrays(right.shape, right.sharding, shards)
    state = state._replace(delayed={**state.delayed, NAME: wrong})
    with pytest.raises(CheckpointError) as caught:
        require_equal(delayed_boxes(state), Alone(), 3)
    assert str(caught.value).startswith(
        f"the checkpoint of step 3: '{NAME}' [0:2,4:8] must be the same on all devices that hold it, and element 6 is 1.0 and 0.25 on "
        f"devices of process 0. Nothing was saved."
    )


def test_a_weight_that_differs_on_one_device_is_named() -> None:
    plan = plan_of(Case(model="llama3-test", layout="hsdp", mesh="data=2,fsdp=2"))
    mesh = device_mesh(plan.mesh)
    state = initial_state(plan, mesh, 0)
    assert unequal_weights(weight_replicas(state, plan, mesh), Alone(), 1) is None

    name = "layers.attention.q"
    right = state.weights[name]
    shards = [shard.data for shard in right.addressable_shards]
    shards[3] = jax.device_put(shards[3].at[0, 0].add(1e-7), shards[3].device)
    wrong = jax.make_array_from_single_device_arrays(right.shape, right.sharding, shards)
    state = state._replace(weights={**state.weights, name: wrong})
    text = unequal_weights(weight_replicas(state, plan, mesh), Alone(), 1)
    assert text is not None
    assert text.startswith(f"step 1: weight '{name}' [")
    assert (
        "must have the same bits on all devices that hold it, and has not (processes 0). This step was not saved."
        in text
    )


def test_weights_that_one_device_holds_alone_are_not_read() -> None:
    plan = plan_of(Case(model="llama3-test", layout="fsdp", mesh="fsdp=4"))
    mesh = device_mesh(plan.mesh)
    names = {replica.box.name for replica in weight_replicas(initial_state(plan, mesh, 0), plan, mesh)}
    assert names == {name for name in plan.by_name if name.endswith("norm")}
