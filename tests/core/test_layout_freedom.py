"""What is free of the layout: against quantizing in NumPy device by device."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import FindingsError, Request, load_layout, model_table
from shardwright.core.checks import drafts
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.quantization.quantized import QuantizedOperand
from shardwright.core.quantization.reductions import amax_reductions
from shardwright.core.recipes.presets import PRESETS, preset
from tests.core.low_precision_plans import of_experts, planned
from tests.core.quantized_by_hand import Held, at_once, by_devices, merged
from tests.core.test_findings_properties import cases
from tests.golden.findings_case import Case, request
from tests.matrix import rest

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
    of_device, run = [], None
    for device in range(mesh.num_devices):
        if operand.operand == "weight":
            rows = merged(first.sizes, first.sharding, mesh, device)
        else:
            batch, length = plan.request.batch, plan.request.length
            own = merged((batch,), first.sharding[:1], mesh, device)[microbatch::microbatches]
            chunks = np.array(plan.row_chunks)
            text = (chunks[:, None] * (length // len(chunks)) + np.arange(length // len(chunks))).ravel()
            places = text[merged((length,), first.sharding[1:], mesh, device)]
            run = len(places)
            rows = (own[:, None] * length + places).ravel()
        of_device.append((rows, merged(second.sizes, second.sharding, mesh, device)))
    return Held(mesh=mesh, of_device=tuple(of_device), run=run)


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
    run = None if operand.operand == "weight" else plan.request.length
    return not np.array_equal(found, at_once(full, operand.quantizer, extents, run))


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


def test_a_latent_that_a_ring_passes_on_is_quantized_shard_by_shard():
    """A device multiplies one of four shards of it at a time: each has an amax of its own, and a block of tokens ends with it."""

    def planned_with(move: str, recipe: str) -> Plan:
        return resolve(
            Request(
                layout=replace(load_layout("cp"), move_attention=move),
                table=model_table("deepseek3-test", {}),
                batch=8,
                length=256,
                mesh_sizes={"fsdp": 2, "context": 4},
                precision=preset(recipe),
            )
        )

    def moved(plan: Plan) -> set[tuple[str, str, str]]:
        return {
            (weight.name.rpartition(".")[2], one.product, one.freedom.reason)
            for weight in plan.quantized
            for one in weight.operands
            if one.operand == "input" and not one.freedom.free and weight.name.startswith("moe_layers.attention")
        }

    def amaxes(plan: Plan) -> int:
        found = amax_reductions(plan.request, plan.mesh, plan.quantized)
        return sum(one.times for one in found if one.weights == ("moe_layers.attention.kv_up",))

    ring, gathered = planned_with("ring", "fp8-current"), planned_with("gather", "fp8-current")
    reason = "its amax is of one of 4 shards of the keys around a ring"
    assert moved(ring) == {("kv_up", product, reason) for product in ("output", "weight_gradient")}
    assert not moved(gathered)
    assert amaxes(ring) == 4 * amaxes(gathered) > 0
    in_blocks = {
        name: run for name, _, run in moved(planned_with("ring", "fp8-block")) if "blocks of 128 tokens" in run
    }
    assert in_blocks["kv_up"] == "blocks of 128 tokens of a row, of which a device has 64 in their order"
