"""Of a run on devices: amaxes that differ on one device are refused before they are saved."""

from __future__ import annotations

import jax
import pytest

from shardwright.checkpoint import CheckpointError
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import delayed_boxes
from shardwright.engine_jax.training.state import initial_state
from shardwright.runs.processes.group import Alone
from shardwright.runs.processes.replicas import require_equal
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
