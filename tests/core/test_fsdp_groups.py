"""FSDP parameter groups, against groups, counts and bytes computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.fsdp_groups import groups_of, weights_of
from shardwright.core.plan.plan import PlannedCollective
from shardwright.files import parse_yaml

EMBED, MLP, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 768, 2048, 16, 16, 16, 6
A_LAYER = 2 * EMBED + EMBED * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * EMBED * MLP
"""Elements of a layer of llama3-test: two norms, q, k, v and o, gate, up and down."""


def plan_of(model: str, layout: str, sizes: dict[str, int], **options: object) -> Plan:
    read = read_layout(parse_yaml(layout, "mine.yaml")) if "\n" in layout else load_layout(layout)
    options = {"batch": 8, "length": 64, "engine": "torch", **options}
    return make_plan(Request(layout=read, table=model_table(model), mesh_sizes=sizes, **options))  # pyright: ignore[reportArgumentType]


def of_weights(plan: Plan, **wanted: object) -> list[PlannedCollective]:
    weights = {row.name for row in plan.weights}
    rows = [row for row in plan.collectives if set(row.tensors) <= weights]
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def counted(plan: Plan, **wanted: object) -> list[tuple[str, str, tuple[str, ...], int, int]]:
    return [
        (row.phase, row.kind, row.axes, row.bytes_per_device, row.count_per_step) for row in of_weights(plan, **wanted)
    ]


def test_the_sizes_of_this_file_are_those_of_the_model() -> None:
    ends = 2 * VOCAB * EMBED + EMBED
    assert LAYERS * A_LAYER + ends == model_table("llama3-test").num_parameters


def test_a_layer_is_one_gather_and_the_ends_are_another() -> None:
    plan = plan_of("llama3-test", "fsdp", {"fsdp": 8}, microbatches=4, batch=32)
    ends = 2 * VOCAB * EMBED + EMBED
    assert counted(plan) == [
        ("forward", "all-gather", ("fsdp",), ends * 4, 4),
        ("backward", "reduce-scatter", ("fsdp",), ends * 4, 4),
        ("forward", "all-gather", ("fsdp",), A_LAYER * 4, LAYERS * 4),
        ("recompute", "all-gather", ("fsdp",), A_LAYER * 4, LAYERS * 4),
        ("backward", "reduce-scatter", ("fsdp",), A_LAYER * 4, LAYERS * 4),
    ]
    (forward,) = of_weights(plan, phase="forward", count_per_step=LAYERS * 4)
    assert forward.component == "mlp"
    assert set(forward.tensors) == {row.name for row in plan.weights if row.stack is not None}


def test_without_recomputation_no_weight_is_gathered_again() -> None:
    assert of_weights(plan_of("llama3-test", "fsdp", {"fsdp": 8}, remat="none"), phase="recompute") == []
    assert of_weights(plan_of("llama3-test", "fsdp", {"fsdp": 8}, remat="dots"), phase="recompute") != []


def test_weights_are_gathered_in_the_computations_dtype_and_gradients_reduced_in_their_own() -> None:
    plan = plan_of("llama3-test", "fsdp", {"fsdp": 8}, dtype="bfloat16")
    assert {row.bytes_per_device for row in of_weights(plan, phase="recompute")} == {
        (A_LAYER - 2 * EMBED) * 2,
        # Norms are used in float32, so they are a group of their own.
        2 * EMBED * 4,
    }
    assert (A_LAYER - 2 * EMBED) * 4 in {row.bytes_per_device for row in of_weights(plan, phase="backward")}


def test_replicas_are_all_reduced_once_a_step_after_the_reduce_scatter() -> None:
    plan = plan_of("llama3-test", "hsdp", {"data": 2, "fsdp": 4}, microbatches=4, batch=32)
    ends = (2 * VOCAB * EMBED + EMBED) // 4
    assert counted(plan, phase="update") == [
        ("update", "all-reduce", ("data",), ends * 4, 1),
        ("update", "all-reduce", ("data",), A_LAYER // 4 * 4, LAYERS),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_alone_are_one_all_reduce_of_everything(dtype: str) -> None:
    plan = plan_of("llama3-test", "ddp", {"data": 8}, dtype=dtype)
    # Replicated weights have no gather and so no gather dtype: the norms, used in float32, are no group of their own.
    (group,) = groups_of(one for one in weights_of(plan) if one.layer == 0)
    assert len(group.weights) == 2 + 4 + 3
    assert counted(plan) == [
        ("update", "all-reduce", ("data",), plan.request.table.num_parameters * 4, 1),
    ]


def test_an_uneven_dim_counts_its_padding() -> None:
    # Of 2,048 rows over 48 ranks each has 43, 16 of them padding in all; of a norm's 256 each has 6.
    plan = plan_of("llama3-test", "fsdp", {"fsdp": 48}, batch=48)
    (ends,) = [row for row in of_weights(plan, phase="forward") if row.count_per_step == 1]
    assert ends.bytes_per_device == 48 * (2 * 43 * 256 + 6) * 4


def test_experts_are_a_group_of_their_own() -> None:
    plan = plan_of("mixtral-test", "ep", {"fsdp": 2, "expert": 4})
    groups = groups_of(one for one in weights_of(plan) if one.layer == 0)
    assert [group.axes for group in groups] == [("fsdp",), ("fsdp", "expert")]
    assert {one.component for one in groups[0].weights} == {"moe"}
    assert all(not group.other_replicas(one) for group in groups for one in group.weights)


def test_what_only_some_of_a_group_reduce_is_all_reduced_once_after_the_last_microbatch() -> None:
    plan = plan_of("llama3-test", "fsdp-tp", {"fsdp": 2, "tensor": 4}, microbatches=4, batch=32)
    norms = {row.name for row in plan.weights if "norm" in row.name}
    (row,) = of_weights(plan, phase="update")
    # Each device has half of a norm, from its own tokens on the tensor axis: two of each layer, and one at the end.
    assert (set(row.tensors), row.axes, row.count_per_step) == (norms, ("tensor",), 1)
    assert row.bytes_per_device == (2 * LAYERS + 1) * EMBED // 2 * 4


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp-tp"])
def test_every_weight_that_is_sharded_at_rest_is_gathered_once_in_a_pass(layout: str) -> None:
    other = {"fsdp": {}, "hsdp": {"data": 2}, "fsdp-tp": {"tensor": 2}}[layout]
    plan = plan_of("llama3-test", layout, {"fsdp": 4, **other})
    for phase in ("forward", "backward"):
        named = [name for row in of_weights(plan, phase=phase) for name in row.tensors]
        assert sorted(named) == sorted({row.name for row in plan.weights if "fsdp" in row.shard_group})


def test_each_stack_of_layers_has_groups_of_its_own() -> None:
    plan = plan_of("deepseek3-test", "fsdp", {"fsdp": 8})
    layers = {row.name.split(".")[0]: row.num for row in plan.weights if row.stack is not None}
    assert set(layers) == {"dense_layers", "moe_layers"}
    for row in of_weights(plan, phase="recompute"):
        (stack,) = {name.split(".")[0] for name in row.tensors}
        assert row.count_per_step == layers[stack]


def moved_again(model: str, layout: str, sizes: dict[str, int], **options: Any) -> dict[str, int]:
    """Collectives of activations in the recomputation, by engine."""
    found: dict[str, int] = {}
    for engine in ("jax", "torch"):
        plan = plan_of(model, layout, sizes, engine=engine, **options)
        again = (row for row in plan.collectives if row.phase == "recompute")
        found[engine] = sum(row.count_per_step for row in again if plan.by_name[row.tensors[0]].kind == "activation")
    return found


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_saved_products_spare_no_move(remat: str) -> None:
    # Two gathers of the stream in a layer, and the scatter after attention; the one after the layer is not needed.
    again = moved_again("llama3-test", "tp", {"tensor": 8}, remat=remat)
    assert again == {"jax": 3 * LAYERS, "torch": 3 * LAYERS}


def test_pytorch_repeats_what_leaves_the_experts_where_shared_experts_follow() -> None:
    """It recomputes a layer in its order, and JAX only what the backward pass needs."""
    again = moved_again("deepseek3-test", "tp", {"tensor": 2})
    with_experts = plan_of("deepseek3-test", "tp", {"tensor": 2}).by_name["router.output"].num
    # And it gathers the input of both, which XLA gathers once.
    assert again["torch"] - again["jax"] == 2 * with_experts > 2
    ring = "name: ring\nmesh: {x: 2}\nroles: {x: {elsewhere: fsdp, moe: expert}}\nmove: {moe: ring}\n"
    again = moved_again("deepseek3-test", ring, {"x": 2})
    assert again["torch"] - again["jax"] == with_experts
    again = moved_again("mixtral-test", "tp", {"tensor": 2})
    assert again["torch"] == again["jax"]
    # Here the move after the router's output is that into the residual stream.
    own = "name: own\nmesh: {a: 2, b: 2}\nroles: {a: fsdp, b: {elsewhere: idle, moe: expert, router: data}}\n"
    again = moved_again("deepseek3-test", own, {"a": 2, "b": 2})
    assert again["torch"] - again["jax"] == with_experts
