"""The shardings of a compiled step's inputs and outputs, against the specs of the plan."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.mesh.notation import parse
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import box_of


def assert_shardings_of_the_plan(compiled: jax.stages.Compiled, plan: Plan) -> None:
    """Every input and output of the step is sharded as in the plan's JSON, by JAX's device indices and by our boxes.

    These are weights, both moments of each, buffers and the batch; the step number and the metrics are replicated.
    """
    (state, batch), by_name = compiled.input_shardings
    state_after, metrics = compiled.output_shardings
    assert not by_name
    rows = {row["name"]: row for row in plan.to_json()["tensors"]}
    frozen = {weight.name for weight in plan.request.table.weights if weight.frozen}
    for shardings in (state, state_after):
        assert shardings.buffers.keys() == frozen
        for held in (shardings.weights, shardings.first, shardings.second):
            assert held.keys() == {weight.name for weight in plan.weights} - frozen
        for weight in plan.weights:
            row = rows[weight.name]
            text, shape = row["at_rest"], tuple(row["shape"])
            if weight.stack is not None and not text.startswith("layers"):
                text, shape = f"layers {text}", (row["num"], *shape)
            kinds = ("buffers",) if weight.name in frozen else ("weights", "first", "second")
            for kind in kinds:
                _assert_sharding(getattr(shardings, kind)[weight.name], text, shape, plan, f"{kind}: {weight.name}")
        _assert_sharding(shardings.step, "", (), plan, "step")
    shape = (plan.request.batch, plan.request.length)
    assert batch.keys() == {"tokens", "targets", "positions", "segments", "valid"}
    for name, sharding in batch.items():
        _assert_sharding(sharding, rows["input.tokens"]["in_use"], shape, plan, name)
    for name, sharding in zip(metrics._fields, metrics, strict=True):
        _assert_sharding(sharding, "", (), plan, name)


def _assert_sharding(sharding: Sharding, text: str, shape: tuple[int, ...], plan: Plan, name: str) -> None:
    mesh = device_mesh(plan.mesh)
    entries = [tuple(word.split("/")[1:]) or None for word in text.split()]
    assert sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*entries)), len(shape)), (name, text, sharding)
    number = {device: number for number, device in enumerate(mesh.devices.flat)}
    theirs = {number[device]: box_of(index, shape) for device, index in sharding.devices_indices_map(shape).items()}
    ours = {device: box for device, (box,) in enumerate(owned_boxes(parse(text), plan.mesh, shape))}
    assert theirs == ours, (name, text, theirs, ours)
