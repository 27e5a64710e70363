"""Which findings a machine adds to a plan, and which fix is printed. Golden files hold their full texts."""

from __future__ import annotations

import pytest

from shardwright import make_plan
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import located
from shardwright.core.layout.reading import read_layout
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.cost.topology import TimedPlan, _seconds_if_closed
from shardwright.cost.wording import seconds_text
from shardwright.models import build
from tests.cost.plans import plan_of, priced


def of(plan: Plan, code: str) -> list[Finding]:
    return [finding for finding in plan.findings if finding.code == code]


def test_an_axis_in_its_node_is_not_named():
    assert not of(priced("llama3-test", "fsdp-tp", "h100:2x8", mesh_sizes={"tensor": 8}, batch=16), "SW201")


def test_a_hot_axis_outside_its_node_is_named_with_its_time():
    plan = priced("llama3-test", "fsdp-tp", "h100:4x4", mesh_sizes={"tensor": 8}, batch=16)
    (found,) = of(plan, "SW201")
    assert found.fix.startswith("--mesh tensor=4") or found.tried
    seconds = sum(one.seconds or 0 for one in plan.collectives if "tensor" in one.axes)
    assert found.cost.startswith(f"{seconds_text(seconds)} of ")
    assert found.needed == "'tensor' within one node, which has 4 devices"
    (found,) = of(priced("llama3-test", "fsdp-tp", "v5e:2x2*2", mesh_sizes={"tensor": 8}, batch=16), "SW201")
    assert found.needed == "'tensor' within one slice, which has 4 devices"


def test_links_without_a_figure_are_reported_so_and_have_no_cost():
    (found,) = of(priced("llama3-test", "fsdp-tp", "mi325x:2x4", mesh_sizes={"tensor": 8}, batch=16), "SW201")
    assert found.found == "tensor 8 spans 2 nodes: no figure out of a device, instead of 316 GB/s inside one"
    assert found.cost == ""
    # The gathers over both nodes have no time, and the collectives of tokens in a node are latency-bound.
    plan = priced("mixtral-test", "ep", "mi325x:2x4", mesh_sizes={"fsdp": 4, "expert": 2}, batch=16)
    (found,) = of(plan, "SW204")
    seconds = sum(one.seconds for one in plan.collectives if one.seconds is not None)
    assert any(one.seconds is None for one in plan.collectives)
    assert found.cost == f"{seconds_text(seconds)} of {seconds_text(seconds)} of communication a step, 100%"


def test_an_axis_is_named_with_each_of_its_hot_roles():
    (found,) = of(priced("mixtral-test", "tp-as-ep", "h100:2x4", mesh_sizes={"tensor": 8}), "SW201")
    assert found.where == "axis 'tensor' as expert and tensor"
    (found,) = of(priced("mixtral-test", "tp-as-ep", "h100:2x4", move_moe="weights", mesh_sizes={"tensor": 8}), "SW201")
    assert found.where == "axis 'tensor' as tensor"


@pytest.mark.parametrize(
    ("chips", "tensor", "batch", "fix"),
    [
        # In nodes of 4 there are two of tensor=8 for the rows, and four of tensor=4.
        ("h100:4x4", 8, 4, "--mesh data=1,fsdp=4,tensor=4"),
        ("h100:4x4", 8, 2, ""),
        ("h100:2x1", 2, 2, "--mesh data=1,fsdp=2,tensor=1"),
    ],
)
def test_an_axis_as_large_as_a_node_is_the_fix_if_each_device_has_a_row(chips, tensor, batch, fix):
    # No option gives the number of devices; a fix keeps the number of the chips.
    machine = read_machine(chips)
    sizes = {"data": 1, "fsdp": machine.num_devices // tensor, "tensor": tensor}
    plan = plan_of("llama3-test", "fsdp-tp", chip=machine.chip, mesh_sizes=sizes, batch=batch)
    (found,) = of(price(plan, machine), "SW201")
    # Where it is slower by the plan, the finding says so in place of the fix.
    assert found.fix in (fix, "")
    assert bool(found.fix or found.tried) == bool(fix)


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        # Nodes of 8. Of two orders that work, the one that moves only this axis; as first axis, expert would be outside.
        ({"tensor": 2, "fsdp": 4, "expert": 2}, "mesh: {fsdp: 4, expert: 2, tensor: 2}"),
        ({"tensor": 2, "expert": 4, "fsdp": 2}, "mesh: {fsdp: 2, tensor: 2, expert: 4}"),
    ],
)
def test_an_order_that_moves_an_axis_into_its_node_moves_no_other_out(mesh, fix):
    roles = {"tensor": "tensor", "fsdp": "fsdp", "expert": {"elsewhere": "fsdp", "moe": "expert"}}
    layout = read_layout(located({"name": "mine", "mesh": mesh, "roles": {axis: roles[axis] for axis in mesh}}))
    machine = read_machine("h100:2x8")
    given = Request(layout=layout, table=build("mixtral-test"), batch=64, length=4096, devices=16, chip=machine.chip)
    (found,) = of(price(make_plan(given), machine), "SW201")
    assert (found.where, found.fix) == ("axis 'tensor' as tensor", fix)


def test_gathers_of_expert_weights_may_span_nodes():
    options = {"mesh_sizes": {"fsdp": 1, "expert": 16}, "batch": 16}
    assert of(priced("deepseek3-test", "ep", "h100:2x8", **options), "SW201")
    assert not of(priced("deepseek3-test", "ep", "h100:2x8", move_moe="weights", **options), "SW201")


def test_an_axis_that_only_shards_rows_may_span_nodes():
    assert not of(priced("llama3-test", "hsdp", "h100:2x8", mesh_sizes={"data": 2, "fsdp": 8}, batch=16), "SW201")


@pytest.mark.parametrize(
    ("chips", "sizes", "severity"),
    [
        ("v5p:8x8x8", {"fsdp": 128, "expert": 4}, "warning"),
        ("v5p:4x4x4", {"fsdp": 16, "expert": 4}, None),
        ("v5p:2x2x4", {"fsdp": 4, "expert": 4}, None),
        ("v5e:4x4", {"fsdp": 4, "expert": 4}, "info"),
    ],
)
def test_open_lines(chips, sizes, severity):
    found = of(priced("deepseek3-671b", "ep-as-cp", chips, mesh_sizes=sizes, batch=128), "SW202")
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_the_smallest_entire_dim_that_works_is_the_fix():
    # Of rings of 8, 8 and 16 the 64 take the last and half of another. With 8, 16 and 8 each axis has its own ring.
    options = {"mesh_sizes": {"data": 8, "fsdp": 2, "tensor": 64}, "batch": 128}
    (found,) = of(priced("llama3-8b", "fsdp-tp", "v5p:8x8x16", **options), "SW202")
    assert (found.found, found.fix) == (
        "tensor 64: an open line of 4, a part of a ring",
        "--mesh data=8,fsdp=16,tensor=8",
    )


def test_an_open_line_is_slower_than_a_ring():
    (found,) = of(priced("mixtral-8x7b", "ep", "v5e:8x16", mesh_sizes={"fsdp": 16, "expert": 8}, batch=128), "SW202")
    now, closed = found.cost.split(" of communication a step, where rings would take ")
    assert now != closed


def test_a_line_of_two_is_no_open_line():
    machine = read_machine("v5p:2x2x2")
    options = {"mesh_sizes": {"fsdp": 4, "expert": 2}, "devices": 8, "batch": 8, "chip": machine.chip}
    timed_plan = TimedPlan.of(plan_of("mixtral-test", "ep", **options), machine)
    assert {one.kind for one in timed_plan.plan.collectives if "expert" in one.axes} >= {"all-gather", "all-to-all"}
    assert _seconds_if_closed(timed_plan, {"expert"}) == timed_plan.seconds({"expert"}) > 0
    assert not of(price(timed_plan.plan, machine), "SW202")


def test_small_messages_are_named_where_they_are_most_of_the_time():
    assert of(priced("llama3-test", "fsdp", "v5e:2x4"), "SW204")
    assert not of(priced("llama3-8b", "fsdp", "v5p:2x2x2", batch=8), "SW204")


@pytest.mark.parametrize(
    ("chips", "num_bytes"),
    [
        # Lines of 2 and 4: a microsecond for each of 1 + 3 hops, and 45 GB/s times 2/1 and 4/3 to send.
        ("v5e:2x4", 4e-6 * 45e9 * (2 + 4 / 3)),
        # An all-gather in one node: 6.6 microseconds and one for each of 7 steps, and 7/8 of the bytes come from the others at 370 GB/s.
        ("h100:8", 13.6e-6 * 370e9 * 8 / 7),
    ],
)
def test_the_smallest_message_takes_as_long_to_send_as_its_latency(chips, num_bytes):
    (found,) = of(priced("llama3-test", "fsdp", chips), "SW204")
    assert found.needed == f"messages of {bytes_text(num_bytes)} or more there"
