"""Role tables that nobody wrote, for models of the smallest sizes: each that the planner has no fault to find with is
held against one device.

    python -m tests.sameness.random_layouts [--first 0] [--count 100]
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import cache
from typing import Any

import jax
import numpy as np
import yaml

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.cli.values import settings
from shardwright.core.errors import ShardwrightError
from shardwright.core.layout import ATTENTION_MOVES, MOE_MOVES
from shardwright.core.layout_reading import read_layout
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.request import Request
from shardwright.core.roles import ROLES
from shardwright.engine_jax.mesh import device_mesh
from shardwright.engine_jax.state import State, initial_state
from shardwright.engine_jax.step import batch_sharding, gradient_function
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.engine_jax.made_rows import LENGTH, tokens_of
from tests.engine_jax.steps import GRADIENTS, QUICKLY, gradient_differences, laid_out

ROWS, VOCAB = 8, 256
SMALLEST = {
    "llama3-test": "num_layers=1,embed=32,num_heads=4,head_dim=8,mlp=32",
    "mixtral-test": "num_layers=1,embed=32,num_heads=4,num_kv_heads=4,head_dim=8,mlp=32,num_experts=8",
    "deepseek3-test": "num_layers=2,embed=32,q_lora=16,kv_lora=8,nope_dim=8,rope_dim=8,value_dim=8,mlp=32,"
    "expert_mlp=16,num_experts=8,num_groups=2,num_chosen_groups=1,top_k=2",
}
OUTSIDE = ("data", "fsdp", "fsdp", "context", "context", "tensor", "tensor", "idle")
COMPONENTS = ("input", "embedding", "residual", "attention", "mlp", "router", "moe", "logits")


Model = tuple[str, tuple[tuple[str, str], ...]]
"""A model, and its dimensions."""


def random_request(seed: int) -> tuple[Request, Model] | None:
    """A request by a seed, and the model that it is for; None where its layout cannot be."""
    dice = random.Random(seed)
    model = dice.choice(list(SMALLEST))
    roles: dict[str, Any] = {}
    for axis in ("a", "b", "c")[: dice.choice((1, 2, 2, 3, 3))]:
        elsewhere = dice.choice(OUTSIDE)
        entry: dict[str, Any] = {"elsewhere": elsewhere}
        if model != "llama3-test" and dice.random() < 0.6:
            entry["moe"] = "expert"
        for component in COMPONENTS:
            if dice.random() < 0.12 and component not in entry:
                entry[component] = dice.choice([r for r in OUTSIDE if component in ROLES[r].components])
        if entry.get("residual", elsewhere) == "tensor" and dice.random() < 0.6:
            entry["sequence_parallel"] = True
        if {"context", "fsdp"} & set(entry.values()) and dice.random() < 0.2:
            entry["weights"] = "whole"
        roles[axis] = entry
    sizes = {axis: dice.choice((2, 2, 4) if len(roles) < 3 else (2,)) for axis in roles}
    moves = {"attention": dice.choice(ATTENTION_MOVES), "moe": dice.choice([m for m in MOE_MOVES if m != "auto"])}
    dimensions = {**settings([[SMALLEST[model]]]), "vocab": str(VOCAB)}
    if model == "llama3-test":
        dimensions |= {"num_kv_heads": dice.choice(("4", "2")), "tied": dice.choice(("true", "false"))}
    elif dice.random() < 0.4:
        dimensions["capacity_factor"] = "1.0"
    text = yaml.safe_dump({"name": f"random-{seed}", "mesh": sizes, "roles": roles, "move": moves}, sort_keys=False)
    try:
        request = Request(
            layout=read_layout(parse_yaml(text, f"random-{seed}.yaml")),
            table=build(model, dimensions),
            batch=ROWS,
            length=LENGTH,
            micro_steps=dice.choice((1, 2)),
            load_balanced=dice.random() < 0.3,
        )
    except ShardwrightError:
        return None
    return request, (model, tuple(dimensions.items()))


def random_plan(seed: int) -> tuple[Plan, Model] | None:
    """The plan of that request; None where there can be none."""
    found = random_request(seed)
    if found is None:
        return None
    try:
        plan = make_plan(found[0])
    except ShardwrightError:
        return None
    return None if plan.errors or plan.mesh.num_devices > 8 else (plan, found[1])


Outcome = tuple[float, dict[str, np.ndarray]]


def gradients_of(plan: Plan) -> Outcome:
    """Loss and gradients of one step from the initial values on: the second, half of whose rows are padding."""
    mesh = device_mesh(plan.mesh)
    sharding = batch_sharding(plan, mesh)
    state: State = initial_state(plan, mesh, 0)
    batch = {name: jax.device_put(array, sharding) for name, array in laid_out(tokens_of(2, ROWS, VOCAB), plan).items()}
    given = (state.weights, state.buffers, batch)
    options: dict[str, Any] = {**QUICKLY, "xla_backend_optimization_level": 0}
    found = jax.jit(gradient_function(plan, mesh)).lower(*given).compile(compiler_options=options)(*given)
    return float(found.loss), {name: np.asarray(array) for name, array in found.by_weight.items()}


@cache
def alone(of: Model) -> Outcome:
    """The same on one device."""
    model, dimensions = of
    request = Request(
        layout=read_layout(parse_yaml("name: alone\nmesh: {a: 1}\nroles: {a: data}\n", "alone.yaml")),
        table=build(model, dict(dimensions)),
        batch=ROWS,
        length=LENGTH,
    )
    return gradients_of(make_plan(request))


def assert_same(plan: Plan, of: Model) -> None:
    """The loss and every gradient, as on one device."""
    (loss, ours), (loss_alone, theirs) = gradients_of(plan), alone(of)
    assert abs(loss - loss_alone) <= 1e-5 * loss_alone, f"loss: {loss}, and {loss_alone} on one device"
    for name, difference in gradient_differences(ours, theirs).items():
        assert difference <= GRADIENTS, f"{name}: off by {difference:.2e} of its norm"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    held = failed = 0
    for seed in range(given.first, given.first + given.count):
        if (found := random_plan(seed)) is None:
            continue
        plan, of = found
        held += 1
        try:
            assert_same(plan, of)
        except Exception as error:  # Whatever it is, it is told and the next one tried.
            failed += 1
            request = plan.request
            roles = {axis: dict(entry.roles) for axis, entry in request.layout.entries.items()}
            print(f"seed {seed}: {type(error).__name__}: {error}\n  {of}\n  {plan.mesh} {roles}", flush=True)
        jax.clear_caches()
    print(f"{held} layouts, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
