"""Stages: the units of each, their notation, their tables, and what a plan says of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.findings.errors import InputError
from shardwright.core.pipeline.requests import chosen_stages, stage_requests
from shardwright.core.schedules.actions import Action, Table
from shardwright.core.schedules.clock import run
from shardwright.core.schedules.proof import faults
from shardwright.core.schedules.schedules import SCHEDULES, table_of
from shardwright.core.schedules.ticks import ticks_in
from shardwright.core.schedules.transfers import with_transfers
from shardwright.core.stages.assignment import assigned, balanced
from shardwright.core.stages.choice import choose
from shardwright.core.stages.notation import read_stages, stages_text
from shardwright.core.stages.submodel import stage_table
from shardwright.core.stages.units import UnitCost, units_of


def staged(model: str, *, stages: int, batch: int, microbatches: int, **options) -> sw.Plan:
    sizes = {"stage": stages, "data": 1, "fsdp": options.pop("fsdp", 1)}
    request = sw.Request(
        layout=sw.load_layout("pp"),
        table=sw.model_table(model),
        batch=batch,
        length=options.pop("length", 64),
        mesh_sizes=sizes,
        microbatches=microbatches,
        **options,
    )
    return sw.make_plan(request)


def test_no_assignment_is_more_even():
    """Against all assignments, one by one; with a memory for each stage, against those that fit."""
    draw = random.Random(0)
    refused = 0
    for number in range(300):
        work = [draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.randint(1, 8))]
        stages = draw.randint(1, len(work))
        runs = [
            [work[first:end] for first, end in itertools.pairwise((0, *cuts, len(work)))]
            for cuts in itertools.combinations(range(1, len(work)), stages - 1)
        ]
        sizes, memory = [draw.randint(0, 4) for _ in work], [draw.randint(3, 9) for _ in range(stages)]
        if number % 2:

            def fits(stage: int, first: int, end: int, sizes=sizes, memory=memory) -> bool:
                return sum(sizes[first:end]) <= memory[stage]

            ends = [(0, *cuts, len(work)) for cuts in itertools.combinations(range(1, len(work)), stages - 1)]
            fit = [all(fits(n, *pair) for n, pair in enumerate(itertools.pairwise(one))) for one in ends]
            runs = [run for run, one in zip(runs, fit, strict=True) if one]
            counts = balanced(work, stages, fits)
            if not runs:
                assert counts is None
                refused += 1
                continue
        else:
            counts = balanced(work, stages)
        assert counts is not None
        best = min((max(map(sum, run)), sum(sum(own) ** 2 for own in run)) for run in runs)
        ends = list(itertools.accumulate(counts, initial=0))
        found = [work[first:end] for first, end in itertools.pairwise(ends)]
        assert (max(map(sum, found)), sum(sum(own) ** 2 for own in found)) == best, (work, stages)
    assert 10 < refused < 100


@pytest.mark.parametrize("model", ["deepseek3-671b", "llama3-1b", "mixtral-8x7b"])
def test_stages_are_the_model(model: str):
    """Every layer of every weight is on one stage, a tied weight on the stages of its uses."""
    table = sw.model_table(model)
    units = units_of(table, 4096, recomputed=True)
    stages = assigned(units, balanced([unit.step for unit in units], 5) or ())
    rows = [weight for stage in stages for weight in stage_table(table, stage).weights]
    for weight in table.weights:
        found = sorted((row.first_layer, row.num) for row in rows if row.name == weight.name)
        if weight.stack is None:
            assert len(found) == 1 + len(weight.uses), weight.name
            continue
        layers = [layer for first, num in found for layer in range(first, first + num)]
        assert layers == list(range(weight.first_layer, weight.first_layer + weight.num)), weight.name


def test_notation_is_read_and_written():
    draw = random.Random(1)
    for _ in range(100):
        stages = ["t" * draw.randint(1, 4) for _ in range(draw.randint(1, 9))]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        assert read_stages(stages_text(stages)) == tuple(stages)
    assert read_stages("Et*3|(tt|)*29,L") == ("Ettt", *["tt"] * 29, "L")
    assert read_stages("E(t|)*2 tL") == ("Et", "t", "tL")


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("Ex", 2),
        ("*2", 1),
        ("(t", 1),
        ("t)", 2),
        ("t*", 2),
        ("t*0", 2),
        ("Em|tL", 2),
        ("(t*99999)*9999", 10),
        ("(" * 5000 + "t" + ")" * 5000, 21),
    ],
)
def test_faults_of_the_notation_have_a_place(text: str, column: int):
    with pytest.raises(InputError, match=f"column {column} of"):
        read_stages(text)


def tables(step: int = 1):
    cases = [
        (name, ranks, virtual, microbatches)
        for name, schedule in SCHEDULES.items()
        for ranks in (2, 3, 4)
        for virtual in ([schedule.virtual] if schedule.virtual else [1, 2, 3])
        for microbatches in (1, 2, 3, 4, 6, 8, 12)
        if schedule.runs(ranks, virtual, microbatches)
    ]
    return cases[::step]


def test_of_equal_assignments_the_first_stages_are_the_longer():
    """Also of seconds, whose sums are not exact: they are counted in whole parts of a second."""
    units = units_of(sw.model_table("llama3-test", {"num_layers": "26"}), 64, recomputed=True)
    cost = UnitCost(seconds=0.1, stored_bytes=1, saved_bytes=1, working_bytes=1)
    costs = [replace(cost, seconds=0.1 if unit.layer is not None else 1e-7) for unit in units]
    found = choose(units, ranks=8, microbatches=8, engine="torch", costs=costs)
    assert found.text == "Et*3|(t*4|)*2(t*3|)*4t*3L"


def test_each_table_is_proven():
    for case in tables():
        for table in (table_of(*case), with_transfers(table_of(*case))):
            assert faults(table) == [], case


def test_a_fault_in_a_table_is_found():
    """An action that is dropped, made twice, or put on another rank; two transfers that are exchanged."""
    draw = random.Random(2)
    for case in tables(5):
        table = with_transfers(table_of(*case))
        rank = draw.randrange(table.ranks)
        at = draw.randrange(len(table.actions[rank]))
        action = table.actions[rank][at]
        others = {number: list(actions) for number, actions in enumerate(table.actions)}

        def with_actions(changed: dict[int, list[Action]], table: Table = table) -> Table:
            return replace(table, actions=[changed[number] for number in range(table.ranks)])

        dropped = {**others, rank: others[rank][:at] + others[rank][at + 1 :]}
        assert faults(with_actions(dropped)), (case, "dropped", str(action))
        assert faults(with_actions({**others, rank: [*others[rank], action]})), (case, "twice", str(action))
        beside = (rank + 1) % table.ranks
        moved = {**dropped, beside: [*others[beside], action]}
        assert faults(with_actions(moved)), (case, "moved", str(action))
        sends = [number for number, one in enumerate(others[0]) if one.kind == "send"]
        if len(sends) > 1:
            first, second = sends[0], sends[1]
            swapped = list(others[0])
            swapped[first], swapped[second] = swapped[second], swapped[first]
            assert faults(with_actions({**others, 0: swapped})), (case, "swapped")


@pytest.mark.parametrize(
    ("name", "virtual", "ranks", "microbatches", "idle", "live"),
    [
        # Idle slots of a rank, of (p - 1)(F + B) / v; live microbatches of the first rank.
        ("gpipe", 1, 4, 8, 3 * 3, 8),
        ("1f1b", 1, 4, 8, 3 * 3, 4),
        ("interleaved", 2, 4, 8, 3 * 3, 11),
        ("interleaved", 4, 4, 8, 3 * 3, 19),
        ("looped-bfs", 2, 4, 8, 3 * 3, 16),
        ("zero-bubble", 2, 8, 32, 7, 16),
        ("zbv", 2, 8, 32, 7, 16),
        ("dualpipev", 2, 8, 32, 7, 17),
        ("circular", 2, 4, 8, 3 * 3, 11),
    ],
)
def test_bubbles_are_those_of_the_papers(name: str, virtual: int, ranks: int, microbatches: int, idle: int, live: int):
    found = run(table_of(name, ranks, virtual, microbatches))
    assert [found.seconds - busy for busy in found.busy] == [idle] * ranks
    assert found.most_live[0] == live


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_plan_with_stages_adds_up(engine):
    """The weights of all ranks are the model's; what a rank holds and moves is what its stages' own plans say."""
    plan = staged("deepseek3-test", stages=3, fsdp=2, batch=24, microbatches=6, engine=engine)
    assert not plan.errors
    pipeline = plan.pipeline
    assert pipeline is not None
    alone = [sw.make_plan(request) for request in stage_requests(plan.request, plan.mesh, pipeline.choice)]
    if engine == "torch":
        assert [stage.weights_bytes for stage in pipeline.stages] == [one.memory.weights_bytes for one in alone]
        frozen = {weight.name for weight in plan.request.table.weights if weight.frozen}
        elements = sum(w.num_parameters for w in plan.request.table.weights if w.name not in frozen)
        assert 2 * sum(stage.gradients_bytes for stage in pipeline.stages) == pytest.approx(4 * elements, rel=0.01)
    else:
        # Arrays of one program: equally large on all stages.
        assert len({stage.weights_bytes for stage in pipeline.stages}) == 1
        assert pipeline.stages[0].weights_bytes >= max(one.memory.weights_bytes for one in alone)
    assert plan.memory.total_bytes_per_device == max(pipeline.total_bytes(rank) for rank in range(3))
    own = alone[pipeline.slowest]
    # On JAX every rank has both ends, and sums their gradients.
    of_ends = {("all-reduce", ("stage",)), ("all-reduce", ("stage", "fsdp"))} if engine == "jax" else set()
    assert {(c.kind, c.axes) for c in plan.collectives} == {
        *((c.kind, c.axes) for c in own.collectives),
        ("permute", ("stage",)),
        *of_ends,
    }
    sends = [c for c in plan.collectives if c.kind == "permute"]
    rows = own.by_name["residual.stream"].bytes_per_device
    assert {c.bytes_per_device for c in sends} == {rows}
    # One program passes on in every tick.
    planned = 2 * ticks_in(3, 1, 6) if engine == "jax" else 6 * (2 if pipeline.slowest == 1 else 1)
    assert sum(c.count_per_step for c in sends) == planned


def test_every_stage_quantizes_its_layers_but_the_last_of_the_model():
    recipe = replace(sw.load_recipe("mxfp8"), high_layers=2)
    plan = staged("llama3-test", stages=2, batch=8, microbatches=4, engine="torch", precision=recipe)
    layers = [{weight.num for weight in stage.quantized} for stage in plan.stage_plans]
    own = [len(stage.stage.layers) for stage in plan.pipeline.stages] if plan.pipeline else []
    assert layers == [{own[0]}, {own[1] - 2}]


def test_ends_that_all_stages_share_are_no_units():
    layout = sw.load_layout("pp")
    entry = layout.entries["stage"]
    shared = replace(entry, roles={**entry.roles, "logits": "tensor"}, declared=frozenset({"logits"}))
    plan = staged("llama3-test", stages=2, batch=8, microbatches=4)
    request = replace(plan.request, layout=replace(layout, entries={**layout.entries, "stage": shared}))
    choice = chosen_stages(request, plan.mesh)
    assert choice is not None
    assert "".join(stage.letters for stage in choice.stages) == "E" + "t" * request.table.num_layers


def test_a_program_of_the_users_has_no_schedule():
    """Its stages divide the stacks of layers. What schedules ours is refused, not ignored."""
    table = sw.table_of({"q": ((12, 64, 4, 16), "float32")}, {"q": "attention: layers embed heads head_dim"})
    layout = sw.load_layout("pp")
    entry = replace(layout.entries["stage"], virtual=2, schedule="interleaved")
    own = replace(layout, entries={**layout.entries, "stage": entry})
    request = sw.Request(layout=own, table=table, devices=4, batch=8, length=16, schedule="gpipe", stages="tt|tt")
    found = [(one.where, one.found, one.fix) for one in sw.make_plan(request).errors]
    lacks = "and no schedule is known of a user's own program"
    assert found == [
        ("--schedule", f"--schedule gpipe, {lacks}", "leave --schedule out"),
        ("--stages", f"--stages tt|tt, {lacks}", "leave --stages out"),
        ("axis 'stage' of layout 'pp'", f"virtual 2 and schedule interleaved, {lacks}", "stage: stage under 'roles'"),
    ]
    assert not sw.make_plan(replace(request, layout=layout, schedule=None, stages=None)).errors


def test_a_tied_weight_of_two_stages_is_updated_once_on_a_rank():
    """In a V one rank has both uses, and its second stage a copy of the weight. Two ranks take the same step."""
    options = {"batch": 8, "length": 16, "microbatches": 4, "engine": "torch", "average": 0.9}
    table = sw.model_table("llama3-test", {"tied": "true", "num_layers": "2"})
    alone = sw.make_plan(
        sw.Request(layout=sw.load_layout("fsdp"), table=table, mesh_sizes={"fsdp": 1}, **options)
    ).memory
    [tied] = [weight for weight in table.weights if weight.uses]
    for schedule, copies in (("zbv", 1), ("1f1b", 2)):
        units = {"stages": "E|t|t|L"} if schedule == "zbv" else {}
        sizes = {"stage": 2, "data": 1, "fsdp": 1}
        request = sw.Request(
            layout=sw.load_layout("pp"), table=table, mesh_sizes=sizes, schedule=schedule, **units, **options
        )
        pipeline = sw.make_plan(request).pipeline
        assert pipeline is not None
        more = 4 * tied.num_parameters
        assert sum(one.weights_bytes for one in pipeline.stages) == alone.weights_bytes + more
        assert sum(one.optimizer_bytes for one in pipeline.stages) == alone.optimizer_bytes + (copies - 1) * 2 * more
        assert sum(one.average_bytes for one in pipeline.stages) == alone.average_bytes + (copies - 1) * more
