"""Recipes under layouts: who agrees on an amax, what is quantized, where shards may end, and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright import InputError, Request, load_layout, make_plan, model_table
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.quantization.units import split_blocks, units_of
from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.recipe import Block, Operand, Product, Quantizer, Recipe
from tests.core.low_precision_plans import SMALL, of_experts, operand_of, planned


def test_replicas_never_agree_and_shards_always_do():
    plan = planned("hsdp", {"data": 2, "fsdp": 4}, preset("fp8-current"))
    assert {weight.agrees for weight in plan.quantized} == {("fsdp",)}
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("fp8-current"))
    assert {weight.agrees for weight in plan.quantized} == {("fsdp", "tensor")}
    # Gathered before it is quantized, a weight is sharded by `tensor` alone; its input also by rows.
    assert operand_of(plan, "mlp.down", "output", "weight").reduced == ("tensor",)
    assert operand_of(plan, "mlp.down", "output", "input").reduced == ("fsdp", "tensor")
    assert operand_of(plan, "mlp.up", "output", "input").reduced == ("fsdp",)
    gathered = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, replace(preset("fp8-current"), gather_quantized=True))
    assert operand_of(gathered, "mlp.down", "output", "weight").reduced == ("fsdp", "tensor")


def test_how_many_amaxes_a_device_reduces_and_how_often():
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("nvfp4"))
    assert operand_of(plan, "mlp.down", "output", "input").values == 1
    rows = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("fp8-row"))
    # A row for each of 4 x 64 tokens of a device; of a weight one for each output.
    assert operand_of(rows, "mlp.down", "output", "input").values == 4 * 64
    assert operand_of(rows, "mlp.down", "output", "weight").values == 64
    once, twice = (planned("fsdp", {"fsdp": 2}, preset("fp8-current"), microbatches=number) for number in (1, 2))

    def amaxes(plan: Plan) -> int:
        return sum(one.count_per_step for one in plan.collectives if one.bytes_per_device == 4)

    assert amaxes(twice) == 2 * amaxes(once) > 0


def test_a_layout_that_shards_nothing_reduces_nothing_and_blocks_inside_shards_never_do():
    for name in PRESETS:
        plan = planned("fsdp", {"fsdp": 1}, preset(name))
        assert not any(one.reduced for weight in plan.quantized for one in weight.operands)
    for name in ("fp8-block", "mxfp8"):
        plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset(name))
        assert not any(one.reduced for weight in plan.quantized for one in weight.operands)


def test_names_of_mesh_axes_do_not_matter():
    table = model_table("llama3-test", SMALL)
    layout = load_layout("fsdp-tp")
    names = dict(zip(layout.mesh, ("alpha", "beta", "gamma"), strict=False))
    renamed = replace(
        layout,
        mesh={names[a]: entry for a, entry in layout.mesh.items()},
        entries={names[a]: entry for a, entry in layout.entries.items()},
    )
    sizes = {"fsdp": 2, "tensor": 2}
    both = [
        resolve(Request(layout=one, table=table, batch=8, length=64, mesh_sizes=given, precision=preset("fp8-current")))
        for one, given in ((layout, sizes), (renamed, {names[a]: size for a, size in sizes.items()}))
    ]
    first, second = ([[one.reduced for one in w.operands] for w in plan.quantized] for plan in both)
    assert second == [[tuple(names[a] for a in axes) for axes in row] for row in first]


def test_amaxes_of_the_plan_are_those_that_a_step_reduces():
    """Counted by hand: llama3 of one layer, fsdp 2 x tensor 2, one amax for each tensor."""
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("fp8-current"), remat="full")
    amaxes = {
        (one.component, one.phase, one.axes): one.count_per_step
        for one in plan.collectives
        if one.kind == "all-reduce" and one.bytes_per_device == 4
    }
    # Weights: q, k, v, o and gate, up, down over tensor. Inputs: of q, k and v together, and of gate and up together, over
    # fsdp; of o and down over both. Output gradients: of o and down over fsdp, of the others over both.
    forward = {
        ("attention", ("tensor",)): 4,
        ("attention", ("fsdp",)): 1,
        ("attention", ("fsdp", "tensor")): 1,
        ("mlp", ("tensor",)): 3,
        ("mlp", ("fsdp",)): 1,
        ("mlp", ("fsdp", "tensor")): 1,
    }
    assert amaxes == {
        **{
            (component, phase, axes): n
            for (component, axes), n in forward.items()
            for phase in ("forward", "recompute")
        },
        ("attention", "backward", ("fsdp",)): 1,
        ("attention", "backward", ("fsdp", "tensor")): 3,
        ("mlp", "backward", ("fsdp",)): 1,
        ("mlp", "backward", ("fsdp", "tensor")): 2,
    }


def test_delayed_amaxes_are_reduced_once_a_step_and_kept_in_memory():
    recipe = preset("fp8-delayed", amax_history_len=16)
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, recipe, microbatches=2)
    before = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("mxfp8"), microbatches=2)
    added = [one for one in plan.collectives if one not in before.collectives]
    # Over tensor: 7 weights. Over fsdp: 2 inputs and 2 output gradients. Over both: 2 inputs and 5 output gradients.
    assert {(one.phase, one.kind, one.axes): (one.bytes_per_device, one.count_per_step) for one in added} == {
        ("update", "all-reduce", ("tensor",)): (4 * 7, 1),
        ("update", "all-reduce", ("fsdp",)): (4 * 4, 1),
        ("update", "all-reduce", ("fsdp", "tensor")): (4 * 7, 1),
    }
    assert plan.memory.amax_history_bytes == (7 + 4 + 7) * (1 + 16) * 4
    assert plan.memory.state_bytes - before.memory.state_bytes == plan.memory.amax_history_bytes


def test_a_plan_without_a_recipe_is_as_before():
    one = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("mxfp8"))
    plain = resolve(replace(one.request, precision=None))
    assert plain.quantized == ()
    assert "precision" not in plain.to_json()
    assert (one.collectives, one.memory, one.tensors) == (plain.collectives, plain.memory, plain.tensors)


def test_weights_that_stay_in_high_precision():
    def names(recipe: Recipe, model: str = "deepseek3-test", **settings: str) -> set[str]:
        table = model_table(model, settings)
        layout = load_layout("fsdp")
        plan = resolve(
            Request(layout=layout, table=table, batch=8, length=64, mesh_sizes={"fsdp": 2}, precision=recipe)
        )
        return {weight.name for weight in plan.quantized}

    every = names(preset("mxfp8"))
    assert not any(part in name for name in every for part in ("router", "norm", "embedding", "logits", "bias"))
    assert {"moe_layers.moe.up", "moe_layers.shared.down", "moe_layers.attention.kv_up"} <= every
    without = names(replace(preset("mxfp8"), high=("*.attention.*",)))
    assert without == {name for name in every if ".attention." not in name}
    assert names(replace(preset("mxfp8"), quantized=("logits.*",))) - every == {"logits.kernel"}
    last = replace(preset("nvfp4"), high_layers=2)
    table = model_table("llama3-test", {})
    plan = resolve(Request(layout=load_layout("fsdp"), table=table, batch=8, length=64, devices=2, precision=last))
    assert {weight.num for weight in plan.quantized} == {table.num_layers - 2}
    with pytest.raises(InputError) as caught:
        names(replace(preset("mxfp8"), high=("*.atention.*",)))
    assert str(caught.value).startswith("'high' of the recipe: the pattern '*.atention.*' matches no name. ")


def test_the_unit_of_split_of_a_weight_is_that_of_all_its_products():
    plan = planned("fsdp", {"fsdp": 2}, preset("fp8-block"))
    assert dict(units_of(plan.quantized[0])) == {"embed": 128, "heads": 128}
    plan = planned("fsdp", {"fsdp": 2}, preset("mxfp8"))
    assert dict(units_of(plan.quantized[0])) == {"embed": 32, "heads": 32}
    plan = planned("fsdp", {"fsdp": 2}, preset("fp8-current"))
    assert dict(units_of(plan.quantized[0])) == {"embed": 1, "heads": 1}


@pytest.mark.parametrize("engine", ["jax", "torch"])
@pytest.mark.parametrize(("tensor", "block", "splits"), [(2, 64, False), (4, 32, False), (4, 64, True), (8, 32, True)])
def test_a_shard_that_ends_inside_a_block_is_an_error(engine, tensor, block, splits):
    made = preset("mxfp8", enable_2d_quantization=True)
    sized = {at: replace(each, block=replace(each.block, contracted=block)) for at, each in made.quantizers.items()}
    request = planned("tp", {"tensor": tensor}, replace(made, quantizers=sized), engine=engine).request
    codes = [f.tensor for f in make_plan(request).findings if f.code == "SW416"]
    # Of 128 hidden units and of 8 heads of 16: `tensor` shards both.
    assert bool(codes) == splits, codes


def test_the_largest_block_that_is_split_is_reported():
    made = preset("mxfp8")
    weights: dict[tuple[Product, Operand], Quantizer] = {
        at: replace(each, block=Block(contracted=32, other=64 if at[0] == "input_gradient" else 1))
        for at, each in made.quantizers.items()
        if at[1] == "weight"
    }
    plan = planned("tp", {"tensor": 8}, replace(made, quantizers=weights))
    down = next(one for one in split_blocks(plan.quantized, plan.mesh) if one.weight.endswith("mlp.down"))
    assert (down.dim.names, down.dim.grain(plan.mesh), down.block) == (("mlp",), 16, 64)


def test_codes_and_scales_of_a_weight_in_use():
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("mxfp8"))
    up = next(weight for weight in plan.quantized if weight.name.endswith("mlp.up"))
    # 64 x 64 on a device, with scales along the inputs, and again with scales along the outputs.
    assert (up.codes_bytes, up.scales_bytes) == (2 * 64 * 64, 2 * 64 * 64 // 32)
    square = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset("nvfp4"))
    up = next(weight for weight in square.quantized if weight.name.endswith("mlp.up"))
    assert (up.codes_bytes, up.scales_bytes) == (64 * 64 // 2, 64 * 64 // 256 + 4)


def all_gathers(plan: Plan) -> dict[str, int]:
    """Bytes of all all-gathers of a step, by phase."""
    found: dict[str, int] = {}
    for one in plan.collectives:
        if one.kind == "all-gather":
            found[one.phase] = found.get(one.phase, 0) + one.bytes_per_device * one.count_per_step
    return found


ELEMENTS = 4 * 64 * 128 + 3 * 64 * 128
"""Of the quantized weights of a layer: q, k, v and o, then gate, up and down."""


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_weights_that_are_gathered_quantized_send_codes_and_scales(engine):
    def of(recipe: Recipe) -> dict[str, int]:
        return all_gathers(planned("fsdp", {"fsdp": 2}, recipe, engine=engine))

    dense = of(preset("mxfp8"))
    assert dense == of(replace(preset("fp8-block"), high=("layers.*",)))
    # Float32 becomes a byte, and a scale of a byte for 32 elements; a second copy has scales along the other dim.
    rows = of(replace(preset("mxfp8"), gather_quantized=True))
    sent = ELEMENTS + ELEMENTS // 32
    assert rows["backward"] - dense.get("backward", 0) == sent
    assert dense["forward"] - rows["forward"] == 4 * ELEMENTS - sent
    # JAX recomputes no product for the output of the layer: it needs no codes of `down` for it.
    unused = (64 * 128) * 33 // 32 if engine == "jax" else 0
    assert dense["recompute"] - rows["recompute"] == 4 * ELEMENTS - sent + unused
    # One copy of blocks of 16 x 16 serves both products: 4 bits, and 8 bits for 256 elements.
    square = of(replace(preset("nvfp4"), gather_quantized=True))
    assert square.get("backward", 0) == dense.get("backward", 0)
    assert dense["forward"] - square["forward"] == 4 * ELEMENTS - ELEMENTS // 2 - ELEMENTS // 256
    tensors = of(replace(preset("fp8-current"), gather_quantized=True))
    assert dense["forward"] - tensors["forward"] == 3 * ELEMENTS


def test_an_expert_for_two_devices_rests_and_is_sent_with_padding():
    """Codes are gathered on dim 0: each device has rows for an expert, and one of them has none. Without them another dim is sharded."""
    request = replace(of_experts("ep", {"expert": 4, "fsdp": 2}, preset("fp8-current")).request, engine="torch")

    def sent(recipe: Recipe | None) -> int:
        plan = resolve(replace(request, precision=recipe))
        [found] = [
            one.bytes_per_device
            for one in plan.collectives
            if (one.kind, one.phase) == ("all-gather", "forward") and "layers.moe.up" in one.tensors
        ]
        return found

    matrix = 64 * 32
    assert sent(None) == 3 * 4 * matrix
    assert sent(replace(preset("fp8-current"), gather_quantized=True)) == 2 * 3 * (matrix + 4)
    resting = resolve(replace(request, precision=replace(preset("fp8-current"), rest_quantized=True)))
    assert resting.by_name["layers.moe.up"].bytes_per_device == matrix + 4


def test_amaxes_of_experts_are_of_each_expert_and_never_over_the_axis_that_shards_them():
    plan = of_experts("ep", {"expert": 4, "fsdp": 2}, preset("fp8-current"))
    up = operand_of(plan, "moe.up", "output", "input")
    assert (up.reduced, up.values, up.experts) == (("fsdp",), 1, 1)
    assert operand_of(plan, "moe.up", "output", "weight").reduced == ()
    assert next(weight for weight in plan.quantized if weight.name.endswith("moe.up")).agrees == ("fsdp",)
    plan = of_experts("fsdp", {"fsdp": 2}, preset("fp8-current"))
    assert operand_of(plan, "moe.up", "output", "input").values == 4


def test_a_recipe_is_a_recipe_and_no_name():
    with pytest.raises(InputError) as caught:
        planned("fsdp", {"fsdp": 2}, "mxfp8")  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "precision is 'mxfp8', and must be a Recipe. Give one of shardwright.load_recipe, as load_recipe('mxfp8')."
    )
