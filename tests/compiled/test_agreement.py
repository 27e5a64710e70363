"""Predicted and compiled: what agrees, what differs, and the figures of a comparison."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardwright.compiled.agreement.agreement import Agreement, agree
from shardwright.compiled.agreement.matching import AgreementRow, total
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.cost import read_machine
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.compiled.programs import as_planned, changed, remembered, where, with_more
from tests.cost.plans import plan_of
from tests.golden.layouts_matrix import cases, make

# A target on which no rewrite always applies.
TARGET = "v5p:2x2x2"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with a capacity, so that buffers have a fixed size and no all-to-all is ragged."""
    return plan_of("mixtral-test", "ep", devices=8, batch=16)


def row_of(agreement: Agreement, component: str | None, kind: str, axes: tuple[str, ...]) -> AgreementRow:
    (row,) = [row for row in agreement.rows if (row.component, row.kind, row.axes) == (component, kind, axes)]
    return row


@pytest.mark.parametrize(("preset", "model"), list(cases()))
def test_a_program_equal_to_its_plan_agrees_exactly(preset, model):
    plan = make(preset, model)
    agreement = agree(plan, as_planned(plan, TARGET))
    assert {row.state for row in agreement.rows} <= {"matched"}
    assert agreement.bytes_error == agreement.explained_share == agreement.memory_error == 0
    assert sum(row.predicted_bytes for row in agreement.rows) == total(plan.collectives)
    assert [(row.difference, row.explained_by) for row in agreement.rows] == [(0, ())] * len(agreement.rows)


def test_rows_are_those_of_component_kind_and_axes_in_the_order_of_the_components(plan):
    rows = agree(plan, as_planned(plan, TARGET)).rows
    keys = [(row.component, row.kind, row.axes) for row in rows]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {(one.component, one.kind, one.axes) for one in plan.collectives}
    places = [COMPONENTS.index(row.component) for row in rows if row.component]
    assert places == sorted(places)


@pytest.mark.parametrize(("factor", "state"), [(1.009, "matched"), (1.011, "unmatched"), (0.5, "unmatched")])
def test_bytes_may_differ_by_one_percent(plan, factor, state):
    wanted = {"component": "attention", "kind": "reduce-scatter"}

    def scaled(one: CompiledCollective) -> CompiledCollective:
        return replace(one, bytes_per_device=round(one.bytes_per_device * factor))

    agreement = agree(plan, changed(as_planned(plan, TARGET), where(wanted, scaled)))
    row = row_of(agreement, "attention", "reduce-scatter", ("fsdp", "expert"))
    assert row.state == state
    assert row.compiled_bytes == pytest.approx(row.predicted_bytes * factor, rel=1e-4)
    if state == "matched":
        matched = sum(row.predicted_bytes for row in agreement.rows)
        assert agreement.bytes_error == pytest.approx(row.predicted_bytes * 0.009 / matched, rel=1e-2)


def test_collectives_on_one_side_only_have_rows(plan):
    more = CompiledCollective(
        kind="permute", axes=("fsdp",), bytes_per_device=100_000, count_per_step=3, dtypes=("float32",), component="mlp"
    )
    program = changed(as_planned(plan, TARGET), where({"component": "router", "kind": "all-gather"}, lambda _: None))
    agreement = agree(plan, with_more(program, [more]))
    missing = row_of(agreement, "router", "all-gather", ("fsdp", "expert"))
    added = row_of(agreement, "mlp", "permute", ("fsdp",))
    assert (missing.state, missing.compiled_bytes, missing.compiled_count) == ("unmatched", 0, 0)
    assert (added.state, added.predicted_bytes, added.compiled_bytes) == ("unmatched", 0, 300_000)
    assert len(agreement.of_state("unmatched")) == 2


def test_another_kind_or_other_axes_do_not_agree(plan):
    def as_sum(one: CompiledCollective) -> CompiledCollective:
        return replace(one, kind="all-reduce")

    def over_fsdp(one: CompiledCollective) -> CompiledCollective:
        return replace(one, axes=("fsdp",))

    wanted = {"component": "attention", "kind": "reduce-scatter"}
    for change in (as_sum, over_fsdp):
        agreement = agree(plan, changed(as_planned(plan, TARGET), where(wanted, change)))
        assert [row.compiled_bytes == 0 for row in agreement.of_state("unmatched")].count(True) == 1
        assert len(agreement.of_state("unmatched")) == 2


def test_axes_in_another_order_and_axes_of_size_one_are_the_same_axes(plan):
    program = changed(as_planned(plan, TARGET), lambda one: replace(one, axes=("data", *one.axes[::-1])))
    assert {row.state for row in agree(plan, program).rows} == {"matched"}


def test_several_tensors_of_one_instruction_are_compared_separately(plan):
    """The loss, counts and a gradient may be one collective: those that the plan leaves out are recognised."""
    summed = [one for one in as_planned(plan, TARGET).collectives if one.kind == "all-reduce"]
    gradients = total(summed)
    merged = replace(
        summed[0],
        component=None,
        bytes_per_device=gradients + 4 + 64,
        count_per_step=1,
        dtypes=("float32", "int32"),
        tensor_bytes=(("float32", gradients), ("float32", 4), ("int32", 64)),
    )
    program = changed(as_planned(plan, TARGET), where({"kind": "all-reduce"}, lambda _: None))
    agreement = agree(plan, with_more(program, [merged]))
    assert not agreement.of_state("unmatched")
    assert row_of(agreement, "residual", "all-reduce", ("fsdp", "expert")).compiled_bytes == gradients
    unplanned = {row.explained_by: row.compiled_bytes for row in agreement.of_state("explained")}
    assert unplanned == {("single numbers",): 4, ("counts",): 64}


def test_only_the_difference_counts_as_explained():
    """One of two gathers of the logits' weight is missing; the other is as planned."""
    plan = plan_of("llama3-test", "fsdp", devices=8, batch=16, microbatches=2)
    wanted = {"component": "logits", "kind": "all-gather"}
    program = changed(as_planned(plan, TARGET), where(wanted, lambda one: replace(one, count_per_step=1)))
    agreement = agree(plan, program)
    row = row_of(agreement, "logits", "all-gather", ("fsdp",))
    assert (row.state, row.explained_bytes) == ("explained", row.predicted_bytes // 2)
    assert agreement.explained_share == pytest.approx(row.predicted_bytes / 2 / total(plan.collectives))


def test_the_json_has_the_fields_of_the_contract(plan):
    wanted = {"component": "router", "kind": "all-gather"}
    program = changed(as_planned(plan, TARGET), where(wanted, lambda _: None))
    agreement = agree(plan, remembered(program, peak_bytes=2 * plan.memory.total_bytes_per_device))
    data = json.loads(json.dumps(agreement.to_json()))
    rows = agreement.rows
    assert data["collectives_matched"] == len(rows) - 1
    assert data["collectives_explained"] == 0
    assert data["collectives_unmatched"] == 1
    assert data["bytes_error"] == 0
    assert data["memory_error"] == -0.5
    assert [row["state"] for row in data["rows"]].count("unmatched") == 1


def test_a_row_knows_its_collectives(plan):
    program = as_planned(plan, TARGET)
    agreement = agree(plan, program)
    for one in program.collectives:
        row = agreement.row_of(one)
        assert (row.component, row.kind, set(row.axes)) == (one.component, one.kind, set(one.axes))
    stranger = replace(program.collectives[0], component=None, kind="permute")
    assert agreement.row_of(stranger).predicted_bytes == 0


def test_sums_for_gathers_agree_where_the_text_does_not_show_what_they_stand_for():
    """libtpu sums shards in zeros for a gather over an entire slice; the scatters stay what they are on TPU7x."""
    machine = read_machine("tpu7x:4x4x2")
    request = Request(
        layout=load_layout("fsdp"),
        table=build("llama3-test"),
        batch=64,
        length=128,
        mesh_sizes={"fsdp": 64},
        chip=machine.chip,
        hops="one",
    )
    plan = make_plan(request)

    def summed(one: CompiledCollective) -> CompiledCollective:
        return replace(one, kind="all-reduce")

    program = changed(as_planned(plan, "tpu7x:4x4x2"), where({"kind": "all-gather"}, summed))
    assert {row.state for row in agree(plan, program).rows} == {"matched"}
    # Half of the bytes are no rewrite of the plan's.
    less = changed(
        program, where({"kind": "all-reduce"}, lambda one: replace(one, bytes_per_device=one.bytes_per_device // 2))
    )
    assert "unmatched" in {row.state for row in agree(plan, less).rows}
