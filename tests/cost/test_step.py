"""The time of a step: overlap, ranges, pipeline stages, and the choice between moving tokens and expert weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.plan.plan import PlannedCollective
from shardwright.core.planning import make_plan
from shardwright.cost import price, read_machine
from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.cost.steps.elementwise import elementwise_bytes
from shardwright.cost.steps.flops import step_flops, update_bytes
from shardwright.cost.steps.precision import computing_seconds, visible_share
from shardwright.models import build
from tests.cost.plans import plan_of, priced, request


def test_every_collective_has_the_time_of_its_executions():
    plan = priced("llama3-8b", "fsdp", "v5p:4x4x4", batch=64)
    mapping, rates = map_mesh(plan.mesh, read_machine("v5p:4x4x4")), Rates.of(chip_of("v5p"), "used")
    assert plan.collectives
    for one in plan.collectives:
        time = time_of(one.kind, one.bytes_per_device, mapping.group(one.axes, one.subgroup), rates)
        assert time is not None
        assert one.seconds == one.count_per_step * time.seconds
    assert plan.step is not None
    assert plan.step.communication_seconds == pytest.approx(sum(one.seconds or 0 for one in plan.collectives))


def test_compute_time_is_that_of_products_attention_and_what_lies_between_them():
    """Llama 3 8B with everything recomputed, a row of 8,192 tokens on each of 64 v5p, by hand."""
    tokens, embed, keys, hidden, vocab, layers = 8192, 4096, 1024, 14336, 128256, 32
    plan = priced("llama3-8b", "fsdp", "v5p:4x4x4", batch=64)
    assert plan.step is not None
    layer = 2 * embed * embed + 2 * embed * keys + 3 * embed * hidden
    again = layer - embed * hidden
    products = 2 * tokens * (layers * (3 * layer + again) + 3 * vocab * embed)
    # Every side is a multiple of the matrix unit's 128. Of the scores a query may see half; backward makes them again.
    scores = layers * 4 * tokens * tokens * embed / 2
    attention = 2 * scores / 275e12 + 2.5 * scores / 270e12
    # The stream six times, four inputs and outputs, queries and keys twice, gate, up and their product: four passes of bfloat16,
    # but for the output of the layer's last product, which nothing needs a second time.
    between = layers * tokens * (4 * (10 * embed + 2 * (embed + keys) + 3 * hidden) - embed) * 2
    loss = tokens * vocab * 4 * 3
    kernels = products / 413.7e12 + attention + (between + loss + update_bytes(plan)) / 2.35e12
    assert plan.step.compute_seconds == pytest.approx(kernels / 0.875)
    assert plan.step.flops_per_device == sum(step_flops(plan).values()) == products + 8 * scores


def test_eager_programs_move_more_bytes_between_products():
    eager, compiled = (priced("llama3-8b", "fsdp", "h100:8", batch=8, engine=one).step for one in ("torch", "jax"))
    assert eager is not None
    assert compiled is not None
    between = sum(elementwise_bytes(plan_of("llama3-8b", "fsdp", devices=8, batch=8)).values()) / 2.85e12 / 0.777
    # PyTorch's attention kernel is another one on an H100, and slower.
    assert eager.compute_seconds - compiled.compute_seconds > 2.1 * between


def test_rows_in_order_over_an_axis_leave_the_last_device_the_most_to_attend_to():
    options = {"mesh_sizes": {"fsdp": 2, "context": 4}, "devices": 8, "batch": 8}
    assert visible_share(plan_of("llama3-8b", "fsdp", devices=8)) == 1 / 2
    assert visible_share(plan_of("llama3-8b", "cp", **options)) == 7 / 8
    assert visible_share(plan_of("llama3-8b", "cp", load_balanced=True, **options)) == 1 / 2
    assert visible_share(plan_of("llama3-8b", "cp", move_attention="ulysses", **options)) == 1 / 2


def test_slots_of_experts_are_multiplied_whether_they_are_full_or_not():
    dropless, padded = (
        price(
            make_plan(replace(request("mixtral-8x7b", "fsdp", devices=8, batch=8, chip=machine.chip), table=table)),
            machine,
        ).step
        for machine in [read_machine("v5p:2x2x2")]
        for table in (build("mixtral-8x7b", {}), build("mixtral-8x7b", {"capacity_factor": "2.0"}))
    )
    assert dropless is not None
    assert padded is not None
    assert padded.flops_per_device == dropless.flops_per_device
    assert 1.5 < padded.compute_seconds / dropless.compute_seconds < 2


def test_float32_is_slower_where_its_products_are():
    def flops_seconds(chips: str, dtype: str) -> float:
        machine = read_machine(chips)
        plan = plan_of("llama3-test", "fsdp", dtype=dtype, batch=16, devices=8, chip=machine.chip)
        assert machine.numbers is not None
        seconds = computing_seconds(plan, machine.numbers, "used")
        assert seconds is not None
        moved = sum(elementwise_bytes(plan).values()) / machine.numbers.read("copy_bytes_per_s")
        return sum(seconds.values()) * machine.numbers.kernels_share() - moved

    assert flops_seconds("h100:8", "float32") == pytest.approx(2 * flops_seconds("h100:8", "bfloat16"))
    assert flops_seconds("v5e:2x4", "float32") == pytest.approx(flops_seconds("v5e:2x4", "bfloat16"))


def with_collectives(*rows: tuple[str, str, str, str]):
    """A plan with these collectives alone, as (component, phase, kind, tensor), each of 1 GB over fsdp."""
    plan = plan_of("llama3-8b", "fsdp", devices=64, batch=64)
    return replace(
        plan,
        collectives=tuple(
            PlannedCollective(
                component=component,
                phase=phase,  # pyright: ignore[reportArgumentType]
                kind=kind,
                axes=("fsdp",),
                bytes_per_device=10**9,
                count_per_step=1,
                tensors=(tensor,),
            )
            for component, phase, kind, tensor in rows
        ),
    )


GATHER = ("mlp", "forward", "all-gather", "layers.mlp.gate")


@pytest.mark.parametrize(
    ("row", "hides"),
    [
        (GATHER, True),
        (("mlp", "backward", "reduce-scatter", "layers.mlp.gate"), True),
        (("attention", "forward", "permute", "attention.keys_attended"), True),
        (("attention", "forward", "all-gather", "attention.keys_attended"), False),
        (("mlp", "forward", "all-reduce", "mlp.projected"), False),
        (("residual", "update", "all-reduce", "layers.residual.attention_norm"), False),
        # Nothing is computed where an embedding is gathered.
        (("embedding", "forward", "all-gather", "embedding.tokens"), False),
    ],
)
def test_which_collectives_overlap_with_the_products_of_their_component(row, hides):
    step = price(with_collectives(row), read_machine("v5p:4x4x4")).step
    assert step is not None
    assert 0 < step.communication_seconds < 0.1
    assert step.exposed_seconds == (0 if hides else pytest.approx(step.communication_seconds))
    assert step.seconds == pytest.approx(step.compute_seconds + step.exposed_seconds)


def test_communication_longer_than_the_products_is_exposed():
    machine = read_machine("v5p:4x4x4")
    plan = with_collectives(*[GATHER] * 200)
    step = price(plan, machine).step
    assert step is not None
    assert machine.numbers is not None
    seconds = computing_seconds(plan, machine.numbers, "used")
    assert seconds is not None
    computed = seconds["mlp", "forward"]
    assert step.exposed_seconds == pytest.approx(step.communication_seconds - computed)


def test_the_range_covers_the_numbers_on_which_sources_disagree_and_the_error_of_estimates():
    disputed, agreed = (priced("llama3-test", "fsdp", chips, batch=16).step for chips in ("v5e:2x4", "v4:2x2x2"))
    assert disputed is not None
    assert agreed is not None
    assert disputed.low_seconds is not None
    assert agreed.low_seconds is not None
    assert disputed.high_seconds == pytest.approx(disputed.seconds * 1.25)
    assert disputed.low_seconds < disputed.seconds / 1.25
    # No step on a v4 was fitted.
    assert (agreed.low_seconds, agreed.high_seconds) == pytest.approx((agreed.seconds / 1.35, agreed.seconds * 1.35))
    links = {constant.name: constant for constant in disputed.constants}["link_bytes_per_s"]
    assert (links.value, [value for value, _ in links.others]) == (45e9, [50e9])
    assert all("2026" in constant.source for constant in disputed.constants)


def test_the_constants_are_the_numbers_that_the_time_is_made_of():
    wide, narrow = (priced("llama3-test", "fsdp", "v4:2x2x2", batch=16, dtype=d).step for d in ("float32", "bfloat16"))
    assert wide is not None
    assert narrow is not None
    names = [{constant.name for constant in step.constants} for step in (wide, narrow)]
    assert names[0] - names[1] == {"float32_share_of_bf16"}
    assert {"bf16_flops_per_s", "hbm_bytes_per_s", "link_bytes_per_s", "hop_latency_s"} <= names[1] <= names[0]


def test_stages_wait_for_each_other():
    """Two stages that first make all forward passes, then all backward passes: the makespan of jobs on two machines."""
    options = {"mesh_sizes": {"stage": 2}, "batch": 32, "microbatches": 4, "schedule": "gpipe"}
    plan = priced("llama3-8b", "pp", "v5p:2x2x2", **options)
    one, pipeline = plan.step, plan.pipeline
    assert one is not None
    assert pipeline is not None
    assert pipeline.send_seconds is not None
    forward, backward = ([stage.work[kind] for stage in pipeline.stages] for kind in ("forward", "backward"))
    seconds = 2 * pipeline.send_seconds + sum(sum(times) + 3 * max(times) for times in (forward, backward))
    assert pipeline.run.seconds == pytest.approx(seconds)
    busy = 4 * max(first + second for first, second in zip(forward, backward, strict=True))
    assert one.idle_seconds == pytest.approx(seconds - busy)
    assert one.seconds == pytest.approx(one.compute_seconds + one.exposed_seconds + one.idle_seconds)


def test_more_devices_compute_less_each():
    times = [priced("llama3-8b", "fsdp", chips, batch=256).step for chips in ("v5p:2x2x4", "v5p:4x4x4", "v5p:4x8x8")]
    computing = [step.compute_seconds for step in times if step is not None]
    assert computing == sorted(computing, reverse=True)
    assert len(computing) == 3


def test_simulated_devices_are_not_timed():
    plan = plan_of("llama3-test", "fsdp", devices=8)
    assert price(plan, read_machine("cpu:8")) is plan


def test_without_a_figure_for_a_link_there_is_no_step():
    plan = priced("llama3-test", "hsdp", "mi325x:2x8", mesh_sizes={"data": 2, "fsdp": 8}, batch=16)
    assert plan.step is None
    assert {one.seconds is None for one in plan.collectives if "data" in one.axes} == {True}
    assert {one.seconds is None for one in plan.collectives if one.axes == ("fsdp",)} == {False}


def test_the_fastest_option_is_chosen_and_all_are_shown():
    plan = priced("mixtral-8x7b", "ep", "v5p:4x4x4", move_moe="auto", batch=64)
    choice = plan.choices[0]
    assert set(choice.seconds) == {"all-to-all", "ring", "weights"}
    assert choice.chosen == min(choice.seconds, key=lambda option: choice.seconds[option])
    assert plan.request.layout.move_moe == choice.chosen
    (found,) = [finding for finding in plan.findings if finding.code == "SW105"]
    assert found.found.startswith(f"'auto' chose '{choice.chosen}'; time of one layer")


def test_a_choice_by_time_may_differ_from_that_by_bytes_and_is_planned():
    # On a ring of 8 a gather sends in both directions at once, and the messages of an all-to-all share links: with 6
    # experts for a token it sends less than the ring gathers, and takes longer.
    options = {"mesh_sizes": {"expert": 8}, "move_moe": "auto", "batch": 128}
    plan = priced("deepseek3-16b", "ep", "v5p:4x4x8", **options)
    choice = plan.choices[0]
    assert min(choice.wire_bytes, key=lambda option: choice.wire_bytes[option]) == "all-to-all"
    assert choice.chosen == plan.request.layout.move_moe == "ring"
    assert choice.to_json()["costs"] == choice.seconds
    held = priced("deepseek3-16b", "ep", "v5p:4x4x8", **{**options, "move_moe": "ring"})
    assert plan.collectives == held.collectives
    assert plan.step == held.step


def test_options_are_timed_as_the_collectives_that_they_are():
    plan = priced("deepseek3-16b", "ep", "v5p:4x4x8", mesh_sizes={"expert": 8}, move_moe="auto", batch=128)
    choice = plan.choices[0]
    tokens, width = 128 * 4096 / 128, 2048 * 2
    one_way = 90e9
    assert plan.request.length == 4096
    # 6 experts for a token, dispatch and combine, in forward, recompute and backward. A ring's sum is not recomputed.
    # The bisection of the ring has two links.
    sent = tokens * 6 * width
    assert choice.seconds["all-to-all"] == pytest.approx(6 * sent * (4 * 4 / 8) / (2 * one_way), rel=1e-6)
    assert choice.seconds["ring"] == pytest.approx(5 * 8 * tokens * width / (2 * one_way), rel=1e-6)
