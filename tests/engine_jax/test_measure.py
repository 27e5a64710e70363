"""What `shardwright calibrate` measures on JAX's devices: everything that a plan wants, each in seconds above zero."""

from __future__ import annotations

from shardwright import make_plan
from shardwright.cost.calibration import wanted
from shardwright.engine_jax.training.measure import measure
from tests.cost.plans import request


def test_everything_that_is_wanted_is_measured():
    plan = make_plan(request("mixtral-test", "ep", mesh_sizes={"fsdp": 2, "expert": 4}, batch=8, length=32))
    sizes = wanted(plan)
    found = measure(plan, sizes, 2)
    kinds = [one.what for one in found]
    assert kinds.count("product") == len(sizes.products)
    assert {"attention forward", "attention backward", "copy", "all-to-all"} <= set(kinds)
    assert len(kinds) == len(sizes.products) + 3 + len(sizes.collectives)
    assert all(len(one.seconds) == 2 and min(one.seconds) > 0 and one.amount > 0 for one in found)
