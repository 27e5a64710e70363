"""Recipes under layouts: who agrees on an amax and what is free, against quantizing in NumPy device by device."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import FindingsError, InputError, Request, load_layout, make_plan, model_table
from shardwright.core.checks import drafts
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.quantization.quantized import QuantizedOperand
from shardwright.core.quantization.units import split_blocks, units_of
from shardwright.core.recipes.presets import PRESETS, preset
from shardwright.core.recipes.recipe import Block, Operand, Product, Quantizer, Recipe
from tests.core.quantized_by_hand import Held, at_once, by_devices, merged
from tests.core.test_findings_properties import cases
from tests.golden.findings_case import Case, request
from tests.matrix import rest

SMALL = {"num_layers": "1", "embed": "64", "num_heads": "8", "num_kv_heads": "8", "mlp": "128", "vocab": "64"}


def planned(layout: str, sizes: dict[str, int], recipe: Recipe, **options) -> Plan:
    table = model_table("llama3-test", SMALL)
    given = {"batch": 8, "length": 64, "engine": "jax", **options}
    return resolve(Request(layout=load_layout(layout), table=table, mesh_sizes=sizes, precision=recipe, **given))


LAYOUTS = {
    "one device": ("fsdp", {"fsdp": 1}, {}),
    "fsdp": ("fsdp", {"fsdp": 4}, {}),
    "hsdp": ("hsdp", {"data": 2, "fsdp": 2}, {}),
    "tp": ("tp", {"tensor": 4}, {}),
    "fsdp-tp": ("fsdp-tp", {"fsdp": 2, "tensor": 2}, {}),
    "cp": ("cp", {"context": 2}, {}),
    "cp in short chunks": ("cp", {"context": 4}, {"length": 48}),
    "cp, head to tail": ("cp", {"context": 2}, {"load_balanced": True}),
    "microbatches": ("fsdp", {"fsdp": 2}, {"microbatches": 2}),
    "microbatches of odd rows": ("fsdp", {"fsdp": 2}, {"microbatches": 2, "length": 40}),
}


def held(plan: Plan, operand: QuantizedOperand, microbatch: int, microbatches: int) -> Held:
    """Where each device has its part of an operand. Rows of a microbatch are every so many-th of a device's."""
    first, second = operand.dims.values()
    mesh = plan.mesh
    of_device = []
    for device in range(mesh.num_devices):
        if operand.operand == "weight":
            rows = merged(first.sizes, first.sharding, mesh, device)
        else:
            batch, length = plan.request.batch, plan.request.length
            own = merged((batch,), first.sharding[:1], mesh, device)[microbatch::microbatches]
            chunks = np.array(plan.row_chunks)
            text = (chunks[:, None] * (length // len(chunks)) + np.arange(length // len(chunks))).ravel()
            places = text[merged((length,), first.sharding[1:], mesh, device)]
            rows = (own[:, None] * length + places).ravel()
        of_device.append((rows, merged(second.sizes, second.sharding, mesh, device)))
    return Held(mesh=mesh, of_device=tuple(of_device))


def drawn(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Values of many magnitudes, by row and by column, so that each block has another amax."""
    numbers = np.random.default_rng(seed)
    values = numbers.standard_normal(shape)
    return (values * np.exp2(numbers.uniform(-6, 6, (shape[0], 1)) + numbers.uniform(-6, 6, shape[1]))).astype(
        np.float32
    )


def layout_moves(plan: Plan, operand: QuantizedOperand, seed: int) -> bool:
    """Whether the values that the codes stand for differ from those of one device in one microbatch."""
    tokens = plan.request.batch * plan.request.length
    first, second = operand.dims.values()
    shape = (first.size if operand.operand == "weight" else tokens, second.size)
    full = drawn(shape, seed)
    extents = tuple(operand.extents.values())
    assert len(extents) == 2
    # A delayed amax is the largest of all microbatches, as if they were one.
    in_turn = operand.operand != "weight" and operand.quantizer.amax == "current"
    microbatches = plan.request.microbatches if in_turn else 1
    found = np.full(shape, np.nan, np.float32)
    for microbatch in range(microbatches):
        part = by_devices(
            full, held(plan, operand, microbatch, microbatches), operand.quantizer, extents, operand.reduced
        )
        found = np.where(np.isnan(part), found, part)
    assert not np.isnan(found).any()
    return not np.array_equal(found, at_once(full, operand.quantizer, extents))


COVERING = {
    "one device": ("nvfp4",),
    "fsdp": ("fp8-current", "fp8-block"),
    "hsdp": ("fp8-current",),
    "tp": ("fp8-row", "nvfp4", "fp8-current"),
    "fsdp-tp": ("fp8-current", "nvfp4"),
    "cp": ("fp8-block", "nvfp4"),
    "cp in short chunks": ("mxfp8", "fp8-current"),
    "cp, head to tail": ("mxfp8", "nvfp4"),
    "microbatches": ("fp8-delayed", "fp8-current", "fp8-block"),
    "microbatches of odd rows": ("mxfp8", "fp8-row"),
}
"""Of all pairs of a layout and a recipe, those that `make test` runs."""
PAIRS = [(where, name) for where in LAYOUTS for name in PRESETS]


@pytest.mark.parametrize(
    ("where", "name"),
    [(where, name) if name in COVERING[where] else rest(where, name) for where, name in PAIRS],
)
def test_an_operand_is_free_exactly_where_devices_make_the_values_of_one_device(name, where):
    layout, sizes, options = LAYOUTS[where]
    recipe = preset(name)
    plan = planned(layout, sizes, recipe, **options)
    seen: set[object] = set()
    for weight in plan.quantized:
        for operand in weight.operands:
            key = (operand.operand, operand.product, tuple(operand.dims.items()))
            if key in seen:
                continue
            seen.add(key)
            moves = any(layout_moves(plan, operand, seed) for seed in range(1 if operand.freedom.free else 2))
            assert moves != operand.freedom.free, (weight.name, operand.product, operand.operand, operand.freedom.text)
    assert seen


@pytest.mark.parametrize("name", ["fp8-current", "fp8-row", "nvfp4", "fp8-delayed"])
def test_without_the_reduction_the_layout_moves_what_shares_a_scale(name):
    plan = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, replace(preset(name), reduce_amax=False))
    reduced = planned("fsdp-tp", {"fsdp": 2, "tensor": 2}, preset(name))
    found = 0
    for weight, other in zip(plan.quantized, reduced.quantized, strict=True):
        for operand, with_it in zip(weight.operands, other.operands, strict=True):
            assert operand.reduced == ()
            assert operand.values == 0
            if with_it.reduced:
                found += 1
                assert not operand.freedom.free
                assert with_it.freedom.free
                assert operand.quantizer.amax == "delayed" or layout_moves(plan, operand, 0)
    assert found


def operand_of(plan: Plan, weight: str, product: str, operand: str) -> QuantizedOperand:
    row = next(row for row in plan.quantized if row.name.endswith(weight))
    return next(one for one in row.operands if (one.product, one.operand) == (product, operand))


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
    assert amaxes == {
        ("attention", "forward", ("tensor",)): 4,
        ("attention", "forward", ("fsdp",)): 1,
        ("attention", "forward", ("fsdp", "tensor")): 1,
        ("attention", "recompute", ("tensor",)): 4,
        ("attention", "recompute", ("fsdp",)): 1,
        ("attention", "recompute", ("fsdp", "tensor")): 1,
        ("attention", "backward", ("fsdp", "tensor")): 3,
        ("attention", "backward", ("fsdp",)): 1,
        ("mlp", "forward", ("tensor",)): 3,
        ("mlp", "forward", ("fsdp",)): 1,
        ("mlp", "forward", ("fsdp", "tensor")): 1,
        ("mlp", "recompute", ("tensor",)): 3,
        ("mlp", "recompute", ("fsdp",)): 1,
        ("mlp", "recompute", ("fsdp", "tensor")): 1,
        ("mlp", "backward", ("fsdp", "tensor")): 2,
        ("mlp", "backward", ("fsdp",)): 1,
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


@given(cases(), st.sampled_from(sorted(PRESETS)), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_random_layouts_plan_with_every_recipe(case: Case, name, gathered, reduced):
    recipe = replace(preset(name), gather_quantized=gathered, reduce_amax=reduced)
    case = replace(case, options={**case.options, "precision": recipe})
    try:
        plan = resolve(request(case))
    except FindingsError:
        return
    data = plan.to_json()["precision"]
    assert isinstance(data, dict)
    assert data["recipe"] == name
    for weight in plan.quantized:
        assert prod(plan.mesh.size(axis) for axis in weight.agrees) >= 1
        for operand in weight.operands:
            replicas = set(plan.mesh.names) - {axis for dim in operand.dims.values() for axis in dim.axes}
            assert not replicas & set(operand.reduced)
    found = {draft.finding.code for draft in drafts(plan)}
    unfree = [one.freedom for weight in plan.quantized for one in weight.operands if not one.freedom.free]
    assert ("SW404" in found) == any(not freedom.ends_inside for freedom in unfree)
    assert ("SW416" in found) == any(freedom.ends_inside for freedom in unfree) or "SW404" in found


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
    assert {phase: dense[phase] - rows[phase] for phase in ("forward", "recompute")} == dict.fromkeys(
        ("forward", "recompute"), 4 * ELEMENTS - sent
    )
    # One copy of blocks of 16 x 16 serves both products: 4 bits, and 8 bits for 256 elements.
    square = of(replace(preset("nvfp4"), gather_quantized=True))
    assert square.get("backward", 0) == dense.get("backward", 0)
    assert dense["forward"] - square["forward"] == 4 * ELEMENTS - ELEMENTS // 2 - ELEMENTS // 256
    tensors = of(replace(preset("fp8-current"), gather_quantized=True))
    assert dense["forward"] - tensors["forward"] == 3 * ELEMENTS


def of_experts(layout: str, sizes: dict[str, int], recipe: Recipe) -> Plan:
    settings_of = {
        "num_layers": "1",
        "embed": "64",
        "num_heads": "4",
        "num_kv_heads": "4",
        "mlp": "32",
        "num_experts": "4",
    }
    table = model_table("mixtral-test", settings_of)
    given = {"batch": 8, "length": 32, "mesh_sizes": sizes, "precision": recipe}
    return resolve(Request(layout=load_layout(layout), table=table, **given))


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_of_an_expert_where_devices_have_some_of_them_each(name):
    """One expert gets every so many-th token of 8 rows, and 4 devices have those of 2 rows each."""
    plan = of_experts("fsdp", {"fsdp": 4}, preset(name))
    tokens = np.flatnonzero(np.random.default_rng(1).random(8 * 32) < 0.3)
    full = drawn((len(tokens), 32), 2)
    own = [np.flatnonzero(tokens // 64 == device) for device in range(4)]
    where = Held(mesh=plan.mesh, of_device=tuple((rows, np.arange(32)) for rows in own))
    checked = 0
    for product in ("output", "weight_gradient"):
        for operand in plan.quantized[-1].operands:
            if (operand.product, operand.operand) == (product, "input"):
                extents = tuple(operand.extents.values())
                assert len(extents) == 2
                one = at_once(full, operand.quantizer, extents)
                each = by_devices(full, where, operand.quantizer, extents, operand.reduced)
                assert np.array_equal(one, each) == operand.freedom.free, (product, operand.freedom.text)
                checked += 1
    assert checked == (1 if name == "fp8-row" else 2)


def test_amaxes_of_experts_are_of_each_expert_and_never_over_the_axis_that_shards_them():
    plan = of_experts("ep", {"expert": 4, "fsdp": 2}, preset("fp8-current"))
    up = operand_of(plan, "moe.up", "output", "input")
    assert (up.reduced, up.values, up.experts) == (("fsdp",), 1, 1)
    assert operand_of(plan, "moe.up", "output", "weight").reduced == ()
    assert next(weight for weight in plan.quantized if weight.name.endswith("moe.up")).agrees == ("fsdp",)
    plan = of_experts("fsdp", {"fsdp": 2}, preset("fp8-current"))
    assert operand_of(plan, "moe.up", "output", "input").values == 4


def test_output_gradients_that_are_partial_where_they_are_quantized():
    """Every head uses a latent, and under `cp` every device computes the keys of all tokens for its own queries."""

    def partial(layout: str, sizes: dict[str, int], model: str = "deepseek3-test") -> set[str]:
        request = Request(
            layout=load_layout(layout),
            table=model_table(model, {}),
            batch=8,
            length=128,
            mesh_sizes=sizes,
            precision=preset("mxfp8"),
        )
        return {
            weight.name.partition(".")[2]
            for weight in resolve(request).quantized
            for one in weight.operands
            if "partial" in one.freedom.reason
        }

    assert partial("tp", {"tensor": 2}) == {"attention.q_down", "attention.kv_down"}
    assert partial("cp", {"context": 2}) == {"attention.kv_up"}
    assert partial("fsdp", {"fsdp": 2}) == set()
    assert partial("ep", {"expert": 2}) == set()
    assert partial("fsdp-tp", {"fsdp": 2, "tensor": 2}, "llama3-test") == set()
    assert partial("cp", {"context": 2}, "llama3-test") == set()


def test_a_recipe_is_a_recipe_and_no_name():
    with pytest.raises(InputError) as caught:
        planned("fsdp", {"fsdp": 2}, "mxfp8")  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "precision is 'mxfp8', and must be a Recipe. Give one of shardwright.load_recipe, as load_recipe('mxfp8')."
    )
