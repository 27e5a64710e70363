"""Ends that all stages share: what each device has of them, what is sent, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import owned_at_rest, saved_boxes
from shardwright.core.schedules.actions import TOGETHER, Action
from shardwright.core.schedules.proof import faults
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.core.stages.choice import timetable
from shardwright.cost import price, read_machine
from shardwright.files import parse_yaml
from tests.core.test_owned_at_rest import counts

STAGES, FSDP, ROWS, LENGTH, MICROBATCHES = 2, 2, 16, 64, 4


def layout_of(stage: str) -> Layout:
    text = f"name: ends\nmesh: {{stage: {STAGES}, fsdp: {FSDP}}}\nroles:\n  stage: {stage}\n  fsdp: fsdp\n"
    return read_layout(parse_yaml(text, "ends.yaml"))


def plan_of(stage: str, engine: str = "torch", model: str = "llama3-test", **settings: str) -> Plan:
    return sw.make_plan(
        sw.Request(
            layout=layout_of(stage),
            table=sw.model_table(model, settings),
            batch=ROWS,
            length=LENGTH,
            microbatches=MICROBATCHES,
            engine=engine,  # pyright: ignore[reportArgumentType]
        )
    )


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize(
    "stage", ["{elsewhere: stage, embedding: fsdp, logits: tensor}", "{elsewhere: stage, logits: tensor}"]
)
def test_every_entry_of_the_vocabulary_is_on_its_devices(stage: str, engine: str):
    """Each device has its part of a shared end, all together have it once, and memory counts what boxes have."""
    plan = plan_of(stage, engine)
    assert plan.pipeline is not None
    kernel = plan.request.table.weight("logits.kernel")
    owned, held = dict(owned_at_rest(plan)), []
    for weight in plan.request.table.weights:
        shape = (weight.num, *weight.shape) if weight.stack else weight.shape
        saved = [
            one.box
            for device in range(4)
            for one in saved_boxes(plan, device)
            if one.saves and one.weight == weight.name
        ]
        assert (counts(shape, saved) == 1).all(), weight.name
        assert counts(shape, saved).sum() == prod(shape)
    for device in range(4):
        boxes = owned["logits.kernel"][device]
        assert sum(box.size for box in boxes) == prod(kernel.shape) // (STAGES * FSDP)
        held.append(sum(box.size for own in owned.values() for box in own[device]))
        # Mesh order: stage, fsdp. The stage's half of the vocabulary, as the role says.
        half = slice(device // FSDP * kernel.shape[1] // 2, (device // FSDP + 1) * kernel.shape[1] // 2)
        assert counts(kernel.shape, list(boxes))[:, half].sum() == sum(box.size for box in boxes)
    if engine == "torch":
        full = max(range(4), key=lambda device: plan.pipeline.total_bytes(device // FSDP) if plan.pipeline else 0)
        assert plan.memory.weights_bytes == 4 * held[full]


def test_what_is_sent_for_shared_ends():
    """By hand, of one device in a step in float32: the vocabulary is gathered over the roles' axes, and the residual stream summed over stages."""
    plan = plan_of("{elsewhere: stage, embedding: fsdp, logits: tensor}")
    table = plan.request.table
    embed, vocab = table.sizes["embed"], table.sizes["vocab"]
    stream = ROWS // MICROBATCHES // FSDP * LENGTH * embed * 4
    found = {
        (one.component, one.phase, one.kind, one.axes, one.bytes_per_device, one.count_per_step)
        for one in plan.collectives
        if "stage" in one.axes and one.kind != "permute"
    }
    assert found == {
        # Rows of the embedding are sharded over the stages: its output is gathered. All of the vocabulary is needed for them.
        ("embedding", "forward", "all-gather", ("stage", "fsdp"), vocab * embed * 4, 1),
        ("embedding", "backward", "reduce-scatter", ("stage", "fsdp"), vocab * embed * 4, MICROBATCHES),
        ("embedding", "forward", "all-gather", ("stage",), stream, MICROBATCHES),
        # What the last stage has, to all; what the logits' shards make of its cotangent, and what the first stage has of its own.
        ("residual", "forward", "all-reduce", ("stage",), stream, MICROBATCHES),
        ("residual", "backward", "all-reduce", ("stage",), stream, 2 * MICROBATCHES),
    }


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "circular"])
def test_every_timetable_has_what_all_ranks_do_together(name: str):
    virtual = SCHEDULES[name].virtual or 2
    table = timetable(name, 3, virtual, 6, "EL")
    assert faults(table) == []
    without = timetable(name, 3, virtual, 6)
    kept = [[one for one in actions if one.kind not in TOGETHER] for actions in table.actions]
    assert kept == [list(actions) for actions in without.actions]


def test_a_fault_in_what_all_ranks_do_together_is_found():
    table = timetable("1f1b", 2, 1, 2, "EL")
    first, second = (list(actions) for actions in table.actions)
    one = Action(1, "logits", 0)
    assert f"{one} on rank 0: missing" in faults(replace(table, actions=([a for a in first if a != one], second)))
    # A rank that has another order than the others waits for ever, and so do they.
    swapped = [*first]
    here, there = (first.index(Action(1, "logits", number)) for number in (0, 1))
    swapped[here], swapped[there] = first[there], first[here]
    assert any("for ever" in fault for fault in faults(replace(table, actions=(swapped, second))))
    late = [a for a in second if a != one]
    late.insert(late.index(Action(1, "backward", 0)) + 1, one)
    assert f"{one} on rank 1: not between forward and logits and input_gradient" in faults(
        replace(table, actions=(first, late))
    )


def test_the_last_stage_is_not_the_slowest():
    """Layers are as even as without ends. The work of the logits is that of the model, a part on each rank."""
    alone, shared = plan_of("stage").pipeline, plan_of("{elsewhere: stage, logits: tensor}").pipeline
    assert alone is not None
    assert shared is not None
    assert shared.shared is not None
    assert (alone.choice.text, shared.choice.text) == ("Et*3|t*3L", "Et*3|t*3")
    work = alone.stages[1].work["forward"] - shared.stages[1].work["forward"]
    assert shared.shared.work["forward"] == pytest.approx(work / STAGES)
    flops = [sum(stage.work["forward"] for stage in one.stages) for one in (alone, shared)]
    assert flops[0] == pytest.approx(flops[1] + STAGES * shared.shared.work["forward"])
    assert shared.idle_share < shared.run.bubble


def test_seconds_of_shared_ends_are_in_the_step():
    machine = read_machine("h100:4")
    plan = price(replace_chip(plan_of("{elsewhere: stage, logits: tensor}"), machine), machine)
    assert plan.step is not None
    assert plan.pipeline is not None
    assert plan.pipeline.shared is not None
    ends = MICROBATCHES * plan.pipeline.shared.busy
    assert 0 < ends < plan.step.seconds
    timetable = plan.pipeline.run.seconds
    assert plan.step.seconds > timetable + ends
    # The update of the weights, and the sums over replicas, which there are none of.
    assert plan.step.seconds - timetable - ends < 0.1 * plan.step.seconds
    assert plan.to_json()["pipeline"]["shared_ends"]["units"] == "L"  # pyright: ignore[reportIndexIssue]


def replace_chip(plan: Plan, machine) -> Plan:
    return sw.make_plan(replace(plan.request, chip=machine.chip))


def test_a_tied_weight_is_shared_in_both_uses():
    plan = plan_of("{elsewhere: stage, logits: tensor}", tied="true")
    [fault] = [one for one in plan.errors if one.code == "SW110"]
    assert (
        fault.found
        == "'embedding.tokens' is used in 'embedding', which one stage has, and in 'logits', which all stages share"
    )
    assert fault.needed == "both on all stages, or each on its own"
    assert fault.fix == "stage: {elsewhere: stage, logits: tensor, embedding: tensor} under 'roles'"
    assert plan.pipeline is None
    both = plan_of("{elsewhere: stage, embedding: tensor, logits: tensor}", tied="true")
    [tied] = [weight for weight in both.request.table.weights if weight.uses]
    held = [sum(box.size for box in boxes) for boxes in dict(owned_at_rest(both))[tied.name]]
    assert np.array_equal(held, [prod(tied.shape) // 4] * 4)


def test_stages_read_the_rows_that_they_need():
    with pytest.raises(
        sw.FindingsError, match="role 'data' in 'input' on an axis of stages, each of which reads the rows"
    ):
        layout_of("{elsewhere: stage, input: data, logits: tensor}")
