"""Products counted from the table, against published formulas and sizes, and over devices."""

from __future__ import annotations

import pytest

from shardwright.core.plan.plan import Plan
from shardwright.cost.steps.flops import step_flops, update_bytes
from tests.cost.plans import plan_of


def total(plan: Plan) -> float:
    """Flops of all devices in a step."""
    return sum(step_flops(plan).values()) * plan.mesh.num_devices


def tokens(plan: Plan) -> int:
    return plan.sizes["batch"] * plan.sizes["length"]


@pytest.mark.parametrize("model", ["llama3-test", "llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b"])
def test_dense_models_have_the_flops_of_the_published_formula(model):
    # PaLM, appendix B: 6 N + 12 L H Q T for a token, N without an embedding that is only looked up.
    plan = plan_of(model, "fsdp", devices=8, remat="none")
    table = plan.request.table
    attention = table.architecture.attention
    looked_up = 0 if table.architecture.tied else table.weight("embedding.tokens").num_parameters
    norms = sum(weight.num_parameters for weight in table.weights if len(weight.shape) == 1)
    products = 6 * (table.num_parameters - looked_up - norms)
    scores = 12 * table.num_layers * attention.heads * attention.head_dim * plan.sizes["length"]
    assert total(plan) == pytest.approx(tokens(plan) * (products + scores), rel=1e-12)


@pytest.mark.parametrize(
    ("model", "active"), [("deepseek3-671b", 37e9), ("mixtral-8x7b", 12.9e9), ("mixtral-8x22b", 39e9)]
)
def test_a_token_passes_through_the_published_number_of_parameters(model, active):
    # Published counts of active parameters have the embedding too, which multiplies nothing.
    plan = plan_of(model, "fsdp", devices=8, remat="none", length=1, batch=8)
    used = total(plan) / 6 / tokens(plan) + plan.request.table.weight("embedding.tokens").num_parameters
    assert used == pytest.approx(active, rel=0.02)


def test_backward_is_twice_forward_and_recomputing_follows_the_policy():
    def by_phase(remat: str) -> dict[str, float]:
        plan = plan_of("mixtral-test", "fsdp", devices=8, remat=remat)
        phases: dict[str, float] = {}
        for (component, phase), flops in step_flops(plan).items():
            key = phase if component != "logits" else f"logits {phase}"
            phases[key] = phases.get(key, 0) + flops
        return phases

    full, dots, none = by_phase("full"), by_phase("dots"), by_phase("none")
    assert full["backward"] == 2 * full["forward"]
    assert full["recompute"] == full["forward"]
    assert full["logits recompute"] == none["recompute"] == 0
    # Under dots products of weights are kept; attention and experts, which are batched, are recomputed.
    plan = plan_of("mixtral-test", "fsdp", devices=8, remat="dots")
    sizes, layers, attention = plan.sizes, plan.request.table.num_layers, plan.request.table.architecture.attention
    scores = 4 * sizes["batch"] * sizes["length"] ** 2 * attention.heads * attention.head_dim * layers
    experts = 2 * 3 * tokens(plan) * plan.request.table.top_k * sizes["embed"] * sizes["mlp"] * layers
    again = {
        component: flops for (component, phase), flops in step_flops(plan).items() if phase == "recompute" and flops
    }
    assert again == {"attention": scores / 8, "moe": experts / 8}
    assert dots["recompute"] == (scores + experts) / 8 < full["recompute"]


@pytest.mark.parametrize(
    ("model", "layout", "sizes"),
    [
        ("llama3-test", "fsdp-tp", {"fsdp": 2, "tensor": 4}),
        ("llama3-test", "cp", {"fsdp": 2, "context": 4}),
        ("mixtral-test", "ep", {"fsdp": 2, "expert": 4}),
        ("mixtral-test", "ep-as-cp", {"fsdp": 2, "expert": 4}),
        ("llama3-test", "hsdp", {"data": 4, "fsdp": 2}),
    ],
)
def test_devices_divide_the_work_if_every_axis_shards_something(model, layout, sizes):
    one = total(plan_of(model, "fsdp", devices=1, mesh_sizes={"fsdp": 1}))
    assert total(plan_of(model, layout, mesh_sizes=sizes)) == pytest.approx(one, rel=1e-12)


def test_a_product_that_an_axis_does_not_shard_is_repeated_on_its_devices():
    one = step_flops(plan_of("deepseek3-test", "fsdp", devices=1, mesh_sizes={"fsdp": 1}))
    tensor = step_flops(plan_of("deepseek3-test", "tp", mesh_sizes={"tensor": 4}))
    assert tensor["router", "forward"] == one["router", "forward"]
    assert tensor["mlp", "forward"] == one["mlp", "forward"] / 4


def test_keys_of_a_gathered_latent_are_computed_on_each_device_that_has_it():
    one = plan_of("deepseek3-test", "fsdp", devices=1, mesh_sizes={"fsdp": 1})
    sharded = plan_of("deepseek3-test", "ep-as-cp", mesh_sizes={"fsdp": 1, "expert": 4})
    up = sum(w.num_parameters for w in one.request.table.weights if w.name.endswith("kv_up"))
    again = 3 * 2 * up * tokens(one)
    difference = total(sharded) - total(one)
    # With full recomputation they count four times: forward, recomputed, and twice in backward.
    assert difference == pytest.approx(again * 4)


def test_with_ulysses_the_keys_of_each_head_are_computed_once():
    one = plan_of("deepseek3-test", "fsdp", devices=1, mesh_sizes={"fsdp": 1})
    exchanged = plan_of("deepseek3-test", "cp", move_attention="ulysses", mesh_sizes={"fsdp": 1, "context": 4})
    assert total(exchanged) == pytest.approx(total(one))


def test_moving_weights_or_tokens_gives_the_same_flops():
    options = {"mesh_sizes": {"fsdp": 2, "expert": 4}}
    weights = plan_of("mixtral-test", "ep", move_moe="weights", **options)
    tokens_moved = plan_of("mixtral-test", "ep", **options)
    assert step_flops(weights) == pytest.approx(step_flops(tokens_moved))


def test_the_bytes_of_an_optimizer_update():
    plan = plan_of("llama3-test", "ddp", devices=1)
    trained = plan.request.table.num_parameters
    # Weight, gradient and two moments read, weight and moments written: seven float32 of each element.
    assert update_bytes(plan) == 7 * 4 * trained
