"""Tokens in two hops: the nodes of a token and the room for them against drawn routings, and the plan's bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.capacity import ROOM_FOR_ALL
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import capacity_of, traffic_of
from shardwright.core.resolution.token_hops import in_two_hops, most_nodes, nodes_of_a_token, token_hops
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.core.test_collectives import plan_of

LAYOUT = """
name: mine
mesh: {{fsdp: {fsdp}, node: {node}, expert: {expert}}}
move: {{moe: {move}}}
roles: {{fsdp: fsdp, node: {{elsewhere: {outside}, moe: expert}}, expert: {{elsewhere: {inside}, moe: expert}}}}
"""
TABLE = build("deepseek3-test")


def layout_of(node: int, expert: int, fsdp: int = 1, move: str = "two-hops", outside="fsdp", inside="fsdp") -> Layout:
    text = LAYOUT.format(node=node, expert=expert, fsdp=fsdp, move=move, outside=outside, inside=inside)
    return read_layout(parse_yaml(text, "mine.yaml"))


def table_of(experts: int, top_k: int, groups: int = 1, chosen: int = 1):
    sizes = {**TABLE.sizes, "experts": experts, "scores": experts, "top_k": top_k}
    return replace(TABLE, sizes=sizes, top_k=top_k, expert_groups=groups, chosen_groups=chosen)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "chosen"),
    [(8, 1, 1, 1), (8, 3, 1, 1), (8, 8, 1, 1), (8, 2, 4, 2), (8, 3, 2, 1), (16, 4, 4, 2), (12, 3, 3, 2), (8, 4, 8, 5)],
)
def test_nodes_of_a_token_are_those_of_all_equally_likely_routings(experts, top_k, groups, chosen) -> None:
    """Every choice of groups, and of experts in them, one by one."""
    of_group = experts // groups
    for nodes in (n for n in (1, 2, 4, 8) if experts % n == 0):
        of_node = experts // nodes
        if of_node % of_group and of_group % of_node:
            continue
        counts = [
            len({expert // of_node for expert in routed})
            for some in combinations(range(groups), chosen)
            for routed in combinations([e for g in some for e in range(g * of_group, (g + 1) * of_group)], top_k)
        ]
        table = table_of(experts, top_k, groups, chosen)
        assert nodes_of_a_token(table, nodes) == pytest.approx(sum(counts) / len(counts))
        assert most_nodes(table, nodes) == max(counts)


def routed(draw: Random, table, length: int, capacity: int | None, crowd: bool) -> list[list[int]]:
    """The experts of each token of a row, without those that are full. ``crowd``: the tokens like some groups and experts more."""
    of_group, taken = table.sizes["experts"] // table.expert_groups, dict.fromkeys(range(table.sizes["experts"]), 0)
    tokens = []
    for _ in range(length):
        some = list(range(table.expert_groups))
        if not crowd:
            draw.shuffle(some)
        experts = [e for g in some[: table.chosen_groups] for e in range(g * of_group, (g + 1) * of_group)]
        if not crowd:
            draw.shuffle(experts)
        chosen = [e for e in experts[: table.top_k] if capacity is None or taken[e] < capacity]
        for expert in chosen:
            taken[expert] += 1
        tokens.append(chosen)
    return tokens


@pytest.mark.parametrize("seed", range(60))
def test_no_routing_needs_more_room_than_there_is(seed: int) -> None:
    """Rows are drawn, and what each device would send and receive is counted, token by token."""
    draw = Random(seed)
    node, expert, fsdp = draw.choice(((2, 2, 2), (2, 4, 1), (4, 2, 1), (2, 2, 1)))
    table = table_of(*draw.choice(((8, 2, 1, 1), (8, 1, 1, 1), (16, 8, 1, 1), (8, 3, 4, 2), (16, 4, 2, 1))))
    table = replace(table, capacity_factor=draw.choice((None, 0.5, 1.0, 1.5)))
    outside, inside = draw.choice(("fsdp", "context")), draw.choice(("fsdp", "context"))
    mesh = Mesh.of(fsdp=fsdp, node=node, expert=expert)
    request = Request(
        layout=layout_of(node, expert, fsdp, outside=outside, inside=inside),
        table=table,
        batch=8,
        length=16,
        expert_buffer=ROOM_FOR_ALL,
    )
    first, last = token_hops(request, mesh)
    traffic, of_node = traffic_of(request, mesh), table.sizes["experts"] // node
    assert traffic.experts * expert == of_node
    crowd, capacity = draw.random() < 0.5, capacity_of(table, 16)
    # The tokens of one group of devices: rows or parts of rows, by the roles outside of the experts.
    rows = [routed(draw, table, 16, capacity, crowd) for _ in range(8 // fsdp)]
    row_parts = {"fsdp": 1, "context": node}[outside] * {"fsdp": 1, "context": expert}[inside]
    held: dict[tuple[int, int], list[list[int]]] = {}
    for a in range(node):
        for b in range(expert):
            places = {"fsdp": 0, "context": 1}
            part = (a * (expert if places[inside] else 1) if places[outside] else 0) + (b if places[inside] else 0)
            of_rows = [r for r in range(len(rows)) if _holds(r, a, b, (outside, inside), (node, expert), len(rows))]
            size = 16 // row_parts
            held[a, b] = [token for r in of_rows for token in rows[r][part * size : (part + 1) * size]]
            assert len(held[a, b]) == traffic.rows * traffic.tokens
    for a in range(node):
        for b in range(expert):
            to_nodes = [len({e // of_node for e in token}) for token in held[a, b]]
            assert sum(to_nodes) <= first.rows
            there = [[t for t in held[c, b] if any(e // of_node == a for e in t)] for c in range(node)]
            assert all(len(tokens) <= first.chunk for tokens in there)
            assert sum(map(len, there)) <= first.buffer_rows
            on = [e for tokens in there for t in tokens for e in t if e // of_node == a]
            assert len(on) <= last.rows
            per_device = [sum(e // traffic.experts == a * expert + d for e in on) for d in range(expert)]
            assert max(per_device) <= last.chunk
            received = [e for tokens in held.values() for t in tokens for e in t]
            assert sum(e // traffic.experts == a * expert + b for e in received) <= last.buffer_rows


def _holds(row: int, a: int, b: int, roles: tuple[str, str], sizes: tuple[int, int], num: int) -> bool:
    """Whether a device has a part of a row: rows are divided over the axes that shard them, major first."""
    place, of = 0, 1
    for number, role, size in zip((a, b), roles, sizes, strict=True):
        if role == "fsdp":
            place, of = place * size + number, of * size
    return row // (num // of) == place


def test_bytes_over_nodes_by_hand() -> None:
    """8 rows of 64 tokens of 128 float32 on 4 devices: two experts of 8 a token, 4 in each of two nodes."""
    text = LAYOUT.format(fsdp=1, node=2, expert=2, move="two-hops", outside="fsdp", inside="fsdp")
    plan = plan_of("mixtral-test", text, {})
    sent = {
        (one.axes, one.phase, *one.tensors): (one.bytes_per_device, one.count_per_step)
        for one in plan.collectives
        if one.component == "moe" and one.kind == "all-to-all"
    }
    # Both experts are in the same node with probability 3/7.
    tokens, token = -(-128 * 11 // 7), 128 * 4
    rows = 128 * 2 * token, 8
    assert sent == {
        (("node",), "forward", "router.grouped", "router.combined"): (tokens * token, 8),
        (("node",), "forward", "router.grouped_experts"): (tokens * 2 * 4, 4),
        (("node",), "forward", "router.weights"): (tokens * 2 * 4, 4),
        (("node",), "recompute", "router.grouped"): (tokens * token, 4),
        (("node",), "recompute", "router.grouped_experts"): (tokens * 2 * 4, 4),
        (("node",), "recompute", "router.weights"): (tokens * 2 * 4, 4),
        (("node",), "backward", "router.grouped", "router.combined"): (tokens * token, 8),
        (("node",), "backward", "router.weights"): (tokens * 2 * 4, 4),
        **{
            (("expert",), phase, "router.dispatched", "router.returned"): rows
            for phase in ("forward", "recompute", "backward")
        },
    }


@pytest.mark.parametrize(("node", "expert", "hops"), [(2, 2, 2), (1, 4, 1), (4, 1, 1), (1, 1, 1)])
def test_an_axis_of_one_device_takes_no_hop(node: int, expert: int, hops: int) -> None:
    layout = layout_of(node, expert, 8 // node // expert)
    plan = make_plan(Request(layout=layout, table=build("mixtral-test"), batch=8, length=64))
    assert len(token_hops(plan.request, plan.mesh)) == hops
    assert in_two_hops(plan.request, plan.mesh) == (hops == 2)
    codes = {finding.code: finding.fix for finding in plan.findings}
    assert codes.get("SW122") == (None if hops == 2 else "move: {moe: all-to-all}")
    direct = make_plan(replace(plan.request, layout=replace(layout, move_moe="all-to-all")))
    assert (plan.collectives == direct.collectives) == (hops == 1)


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("codes", [False, True])
def test_bytes_by_which_auto_chooses_are_those_of_the_plan(remat: str, codes: bool) -> None:
    recipe = replace(preset("fp8-block"), dispatch_quantized=True) if codes else None
    request = Request(
        layout=layout_of(2, 2, 1, "auto"),
        table=build("mixtral-test"),
        batch=8,
        length=64,
        remat=remat,
        precision=recipe,
    )
    plan = make_plan(request)
    (choice,) = plan.choices
    two = make_plan(replace(request, layout=layout_of(2, 2, 1)))
    sent = sum(
        one.bytes_per_device * one.count_per_step / 2
        for one in two.collectives
        if one.component == "moe"
        and one.kind == "all-to-all"
        and not {"router.grouped_experts", "router.weights"} & set(one.tensors)
    )
    # A token's number of nodes is rounded up for the tokens of a device.
    assert sent == pytest.approx(choice.wire_bytes["two-hops"] * 4, rel=0.005)
