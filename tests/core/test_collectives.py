"""The collectives that the specs require, against counts and bytes computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.plan import PlannedCollective
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.files import parse_yaml

BATCH, LENGTH = 8, 64


def plan_of(model: str, layout: str, sizes: dict[str, int], **options: object) -> Plan:
    read = read_layout(parse_yaml(layout, "mine.yaml")) if "\n" in layout else load_layout(layout)
    return make_plan(
        Request(layout=read, table=model_table(model), mesh_sizes=sizes, batch=BATCH, length=LENGTH, **options)  # pyright: ignore[reportArgumentType]
    )


def found(plan: Plan, **wanted: object) -> list[PlannedCollective]:
    return [c for c in plan.collectives if all(getattr(c, name) == value for name, value in wanted.items())]


def only(plan: Plan, **wanted: object) -> tuple[int, int]:
    """Bytes and count of the one row that matches."""
    (row,) = found(plan, **wanted)
    return row.bytes_per_device, row.count_per_step


def test_ddp_moves_gradients_alone_once_a_step() -> None:
    plan = plan_of("llama3-test", "ddp", {"data": 8})
    assert {(c.kind, c.axes, c.phase) for c in plan.collectives} == {("all-reduce", ("data",), "update")}
    total = sum(c.bytes_per_device * c.count_per_step for c in plan.collectives)
    assert total == plan.request.table.num_parameters * 4


def test_fsdp_gathers_each_weight_twice_and_scatters_its_gradient() -> None:
    plan = plan_of("llama3-test", "fsdp", {"fsdp": 8})
    for phase, kind in (("forward", "all-gather"), ("recompute", "all-gather"), ("backward", "reduce-scatter")):
        rows = found(plan, component="mlp", phase=phase, kind=kind, axes=("fsdp",))
        assert sum(c.bytes_per_device * c.count_per_step for c in rows) == 6 * 3 * 256 * 768 * 4
    assert found(plan, component="mlp", phase="recompute") != []
    assert found(plan_of("llama3-test", "fsdp", {"fsdp": 8}, remat="none"), phase="recompute") == []


def test_hsdp_reduce_scatters_each_microbatch_and_all_reduces_replicas_once() -> None:
    plan = plan_of("llama3-test", "hsdp", {"data": 2, "fsdp": 4}, microbatches=2)
    scattered = found(plan, component="mlp", kind="reduce-scatter")
    summed = found(plan, component="mlp", kind="all-reduce")
    assert {(c.axes, c.phase, c.count_per_step) for c in scattered} == {(("fsdp",), "backward", 6 * 3 * 2)}
    assert {(c.axes, c.phase, c.count_per_step) for c in summed} == {(("data",), "update", 6 * 3)}


def test_tensor_parallel_gathers_before_and_scatters_after_each_half_of_a_layer() -> None:
    plan = plan_of("llama3-test", "tp", {"tensor": 8})
    stream = BATCH * LENGTH * 256 * 4
    # One gather before attention, one before the feed-forward layer, one before the logits.
    assert only(plan, component="residual", phase="forward", kind="all-gather") == (stream, 2 * 6 + 1)
    assert only(plan, component="residual", phase="backward", kind="reduce-scatter") == (stream, 2 * 6 + 1)
    for component in ("attention", "mlp"):
        assert only(plan, component=component, phase="forward", kind="reduce-scatter") == (stream, 6)
        assert only(plan, component=component, phase="backward", kind="all-gather") == (stream, 6)


def test_context_gathers_keys_and_values_or_the_latent() -> None:
    plan = plan_of("llama3-test", "cp", {"fsdp": 2, "context": 4})
    keys = BATCH // 2 * LENGTH * 16 * 16 * 4
    integers = BATCH // 2 * LENGTH * 4
    gathers = {"component": "attention", "phase": "forward", "axes": ("context",)}
    assert {(c.bytes_per_device, c.count_per_step) for c in found(plan, **gathers)} == {(keys, 2 * 6), (integers, 2)}
    assert only(plan, component="attention", phase="backward", axes=("context",)) == (keys, 2 * 6)
    latent = BATCH // 2 * LENGTH * (16 + 64) * 4
    plan = plan_of("deepseek3-test", "cp", {"fsdp": 2, "context": 4})
    assert {(c.bytes_per_device, c.count_per_step) for c in found(plan, **gathers)} == {(latent, 4), (integers, 2)}


def test_a_ring_of_keys_sends_a_shard_on_once_less_than_there_are_devices() -> None:
    layout = "name: ring\nmesh: {context: 8}\nroles: {context: context}\nmove: {attention: ring}\n"
    plan = plan_of("llama3-test", layout, {})
    shard = BATCH * LENGTH // 8 * 16 * 16 * 4
    assert only(plan, component="attention", phase="forward", kind="permute") == (shard, 7 * 2 * 6)
    assert found(plan, component="attention", kind="all-gather", axes=("context",), bytes_per_device=8 * shard) == []


ULYSSES = "name: mine\nmesh: {fsdp: 2, context: 2, tensor: 2}\nroles: {fsdp: fsdp, context: context, tensor: tensor}\nmove: {attention: ulysses}\n"


def test_tokens_are_exchanged_for_heads_four_times_a_layer() -> None:
    plan = plan_of("llama3-test", ULYSSES, {})
    rows = plan.by_name
    assert str(rows["attention.queries_attended"].in_use) == "batch/fsdp q_length heads/tensor/context head_dim"
    assert str(rows["attention.keys_attended"].in_use) == "batch/fsdp kv_length kv_heads/tensor/context head_dim"
    shard = BATCH // 2 * LENGTH // 2 * 16 // 2 * 16 * 4
    for phase in ("forward", "recompute", "backward"):
        # Queries, keys and values, and the output of attention.
        assert only(plan, component="attention", phase=phase, kind="all-to-all") == (shard, 4 * 6)


def test_the_latent_is_gathered_where_its_heads_are_exchanged() -> None:
    plan = plan_of("deepseek3-test", ULYSSES, {})
    rows = plan.by_name
    assert str(rows["attention.latent_attended"].in_use) == "batch/fsdp kv_length latent"
    assert str(rows["attention.keys_attended"].in_use) == "batch/fsdp kv_length heads/tensor/context head_dim"
    latent = BATCH // 2 * LENGTH * (16 + 64) * 4
    assert (
        only(
            plan, component="attention", phase="forward", kind="all-gather", axes=("context",), bytes_per_device=latent
        )[1]
        == 4
    )
    moved = {name for c in found(plan, component="attention", phase="forward", kind="all-to-all") for name in c.tensors}
    assert moved == {"attention.queries_attended", "attention.output"}


def test_kv_heads_that_a_rule_replicates_are_replicated_in_attention() -> None:
    rule = "rules: {attention: {kv_heads: []}}\n"
    plan = plan_of("llama3-test", ULYSSES + rule, {})
    rows = plan.by_name
    assert str(rows["attention.keys"].in_use) == "batch/fsdp length/context kv_heads head_dim"
    # Sharded by context alone, they would no longer be those that a device's query heads need.
    assert str(rows["attention.keys_attended"].in_use) == "batch/fsdp kv_length kv_heads head_dim"
    assert str(rows["attention.queries_attended"].in_use) == "batch/fsdp q_length heads/tensor/context head_dim"


def test_a_rule_of_another_component_leaves_kv_heads_as_they_are() -> None:
    rule = "rules: {mlp: {mlp: []}, attention: {heads: [tensor]}}\n"
    rows = plan_of("llama3-test", ULYSSES.replace("ulysses", "gather") + rule, {}).by_name
    assert str(rows["attention.keys"].in_use) == "batch/fsdp length/context kv_heads/tensor head_dim"


def test_positions_and_segments_are_gathered_once_a_step_and_have_no_gradient() -> None:
    plan = plan_of("llama3-test", "cp", {"fsdp": 2, "context": 4}, microbatches=2)
    integers = BATCH // 2 // 2 * LENGTH * 4
    rows = found(plan, component="attention", bytes_per_device=integers)
    assert [(c.phase, c.kind, c.count_per_step) for c in rows] == [("forward", "all-gather", 2 * 2)]


def test_queries_that_stay_where_they_are_take_no_second_buffer() -> None:
    def saved(text: str) -> set[str]:
        plan = plan_of("llama3-test", text, {}, remat="none")
        (run,) = kept_runs(plan.request, plan.mesh, plan.tensors)
        return {name.removeprefix("attention.") for name in run.saved if name.startswith("attention.")}

    # The backward pass reads keys and values as they are attended to; queries and the output are one array each, unless exchanged.
    gathered = {"input", "queries", "keys_attended", "values_attended", "attended"}
    assert saved(ULYSSES.replace("ulysses", "gather")) == gathered
    assert saved(ULYSSES) == gathered - {"queries"} | {"queries_attended", "output"}


EP = "name: mine\nmesh: {{fsdp: 2, expert: 4}}\nroles:\n  fsdp: fsdp\n  expert: {{elsewhere: fsdp, moe: expert}}\nmove: {{moe: {move}}}\n"


@pytest.mark.parametrize("move", ["all-to-all", "ring", "weights"])
def test_tokens_or_weights_are_sent(move: str) -> None:
    plan = plan_of("mixtral-test", EP.format(move=move), {})
    rows = found(plan, component="moe", phase="forward")
    over_expert = [(c.kind, c.bytes_per_device, c.count_per_step) for c in rows if "expert" in c.axes]
    assignments = BATCH // 8 * LENGTH * 2 * 128 * 4
    tokens = BATCH // 2 * LENGTH * 128 * 4
    # The experts' indices and routing weights, two for each token.
    routing = BATCH // 2 * LENGTH * 2 * 4
    # Over the expert axis first, while fsdp still shards them.
    experts = 8 * 128 * 256 * 4 // 2
    assert (
        sorted(over_expert)
        == {
            "all-to-all": [("all-to-all", assignments, 2 * 4)],
            "ring": [
                ("all-gather", routing, 4),
                ("all-gather", routing, 4),
                ("all-gather", tokens, 4),
                ("reduce-scatter", tokens, 4),
            ],
            "weights": [("all-gather", experts, 3 * 4)],
        }[move]
    )


def test_assignments_are_sent_by_ragged_all_to_alls() -> None:
    plan = plan_of("mixtral-test", EP.format(move="all-to-all"), {})
    rows = [row.to_json() for row in plan.collectives]
    ragged = [row for row in rows if row.get("ragged")]
    # Dispatch and combine, in each pass.
    assert {(row["component"], row["phase"], row["count_per_step"]) for row in ragged} == {
        ("moe", phase, 2 * 4) for phase in ("forward", "recompute", "backward")
    }
    assert all("ragged" not in row for row in rows if row["kind"] != "all-to-all")


def test_the_combine_of_a_ring_is_not_recomputed() -> None:
    plan = plan_of("mixtral-test", EP.format(move="ring"), {})
    scattered = found(plan, component="moe", kind="reduce-scatter", axes=("expert",))
    assert [row for row in scattered if row.phase == "recompute"] == []
    assert [row for row in scattered if row.phase == "forward"] != []


@pytest.mark.parametrize("move", ["ring", "weights"])
def test_the_expert_move_does_not_change_a_model_without_experts(move: str) -> None:
    plans = [plan_of("llama3-test", EP.format(move=option), {}) for option in ("all-to-all", move)]
    assert plans[0].tensors == plans[1].tensors
    assert plans[0].collectives == plans[1].collectives


@pytest.mark.parametrize(
    ("sizes", "factor", "buffer", "slots"),
    [
        # Both assignments of each of a group's 4 x 64 tokens may go to the 2 experts of one device, in 4 rows.
        ({"fsdp": 2, "expert": 4}, None, None, 4 * 64 * 2 // (2 * 4)),
        # An expert takes 20 tokens of a row.
        ({"fsdp": 2, "expert": 4}, 1.25, None, 20),
        # Capacity for one and a half times the 128 assignments of one device's tokens.
        ({"fsdp": 2, "expert": 4}, None, 1.5, 192 // (2 * 4)),
        # One device has all experts: one slot for each assignment and no more.
        ({"fsdp": 8, "expert": 1}, None, None, 64 * 2 // 8),
    ],
)
def test_slots_are_the_capacity_for_received_assignments(sizes, factor, buffer, slots) -> None:
    table = replace(model_table("mixtral-test"), capacity_factor=factor)
    layout = read_layout(parse_yaml(EP.format(move="all-to-all"), "mine.yaml"))
    plan = make_plan(
        Request(layout=layout, table=table, mesh_sizes=sizes, batch=BATCH, length=LENGTH, expert_buffer=buffer)
    )
    assert plan.sizes["slots"] == slots
    warnings = [finding for finding in plan.findings if finding.code == "SW405" and finding.severity == "warning"]
    assert bool(warnings) == (buffer is not None)
    for finding in warnings:
        assert "192" in finding.found
        assert "512" in finding.found


def test_a_share_of_replicated_tokens_is_gathered_again() -> None:
    layout = (
        "name: mine\nmesh: {fsdp: 2, tensor: 4}\nroles:\n  fsdp: fsdp\n  tensor: {elsewhere: tensor, moe: expert}\n"
    )
    plan = plan_of("mixtral-test", layout, {})
    stream = BATCH // 2 * LENGTH * 128 * 4
    assert only(plan, component="router", phase="forward", kind="all-gather", axes=("tensor",)) == (stream, 4)
    cotangents = found(plan, component="router", phase="backward", kind="all-gather", axes=("tensor",))
    weights = BATCH // 2 * LENGTH * 2 * 4
    assert sorted((row.bytes_per_device, row.count_per_step) for row in cotangents) == [(weights, 4), (stream, 4)]


def test_a_stage_computes_its_own_layers() -> None:
    unstaged = plan_of("llama3-test", "fsdp", {"fsdp": 4})
    staged = plan_of("llama3-test", "pp", {"stage": 2, "fsdp": 4})
    per_layer = {c.count_per_step for c in found(unstaged, component="mlp", phase="forward")}
    assert per_layer == {18}
    assert {c.count_per_step for c in found(staged, component="mlp", phase="forward")} == {9}


def test_axes_of_size_one_move_nothing() -> None:
    for preset in ("fsdp", "cp", "ep-as-cp", "fsdp-tp"):
        layout = load_layout(preset)
        plan = plan_of("mixtral-test", preset, dict.fromkeys(layout.mesh, 1))
        assert plan.collectives == (), preset


def test_a_replicated_weight_of_which_each_device_uses_a_slice_has_its_gradient_reduced() -> None:
    """Otherwise each device would train its own KV heads, or its own rows of the vocabulary, and keep old values of the rest."""
    rule = "name: mine\nmesh: {fsdp: 2, tensor: 4}\nroles: {fsdp: fsdp, tensor: tensor}\nrules: {attention: {kv_heads: []}}\n"
    rows = {row.name: row for row in plan_of("llama3-test", rule, {}).weights}
    assert rows["layers.attention.k"].gradient == {"fsdp": "all-reduce", "tensor": "all-reduce"}
    assert rows["layers.attention.q"].gradient == {"fsdp": "reduce-scatter"}

    tied = "name: mine\nmesh: {fsdp: 2, tensor: 4}\nroles: {fsdp: fsdp, tensor: {elsewhere: tensor, embedding: idle}}\n"
    rows = {row.name: row for row in plan_of("llama3-1b", tied, {}).weights}
    assert rows["embedding.tokens"].gradient == {"fsdp": "reduce-scatter", "tensor": "all-reduce"}


@pytest.mark.parametrize("idle", ["embedding", "logits"])
def test_a_use_in_which_an_axis_is_idle_makes_the_same_gradient_on_each_of_its_devices(idle: str) -> None:
    """For a tied weight: where the other use shards the rows, the sum over the axis must count this gradient once."""
    roles = f"{{fsdp: fsdp, other: {{elsewhere: fsdp, {idle}: idle}}}}"
    plan = plan_of("llama3-1b", f"name: mine\nmesh: {{fsdp: 4, other: 2}}\nroles: {roles}\n", {})
    uses = weight_reshardings(plan.request, plan.mesh, plan.by_name["embedding.tokens"])
    assert {component: use.replicated_gradient for component, use in uses.items()} == {
        "embedding": (),
        "logits": (),
        idle: ("other",),
    }


def test_a_routing_bias_is_a_buffer_that_every_rank_holds() -> None:
    rows = {row.name: row for row in plan_of("deepseek3-test", "fsdp", {"fsdp": 8}, engine="torch").weights}
    bias = rows["moe_layers.router.bias"]
    assert (str(bias.at_rest), bias.gradient, bias.bytes_per_device) == ("scores", {}, 16 * 4)
    assert str(rows["moe_layers.attention.q_norm"].at_rest) == "norm/fsdp"


@pytest.mark.parametrize("move", ["all-to-all", "ring", "weights"])
def test_the_expert_move_changes_no_dump_or_memory_without_experts(move: str) -> None:
    plan, other = (plan_of("llama3-test", EP.format(move=option), {}) for option in (move, "all-to-all"))
    assert plan.dump() == other.dump()
    assert plan.collectives == other.collectives
    assert plan.memory == other.memory


@pytest.mark.parametrize(("engine", "gathers"), [("jax", 1), ("torch", 2)])
def test_what_routed_and_shared_experts_have_in_common_is_gathered_once_by_a_compiler(
    engine: str, gathers: int
) -> None:
    """Their input, and the cotangent of their outputs. PyTorch executes what is called. Of 4 layers 1 is dense."""
    plan = plan_of("deepseek3-test", "fsdp-tp", {"fsdp": 2, "tensor": 2}, engine=engine)
    of_input = found(plan, kind="all-gather", axes=("tensor",), phase="forward", component="residual")
    of_attention, of_logits, dense = 4, 1, 1
    assert sum(c.count_per_step for c in of_input) == of_attention + of_logits + dense + gathers * 3
    back = found(plan, kind="all-gather", axes=("tensor",), phase="backward")
    of_outputs = [c for c in back if {"shared.projected", "router.output"} & set(c.tensors)]
    assert sum(c.count_per_step for c in of_outputs) == dense + gathers * 3
