"""Closed forms against the worked examples of How To Scale Your Model, and against numbers worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.mesh.mesh import Mesh
from shardwright.cost import read_machine
from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.hardware.links import Group, Line, MeshMapping, map_mesh
from shardwright.cost.steps.collectives import Rates, Time, time_of
from shardwright.cost.steps.rings import NO_STEPS

V4, V5E = (Rates.of(chip_of(kind), "used") for kind in ("v4", "v5e"))
# 450 GB/s, and no steps of rings, as the book's examples have it.
H100 = replace(Rates.of(chip_of("h100"), "fastest"), steps=NO_STEPS)
US = 1e-6
RING, OPEN = Line(size=4, closed=True), Line(size=4)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")


def torus(*lines: Line) -> Group:
    size = 1
    for line in lines:
        size *= line.size
    return Group(inside=size, domains=1, lines=lines)


def node(inside: int, domains: int = 1) -> Group:
    return Group(inside=inside, domains=domains)


def seconds(kind: str, size: float, group: Group, rates: Rates, *, latency: bool = True) -> float:
    time = time_of(kind, round(size), group, rates)
    assert time is not None
    return time.seconds if latency else time.seconds - time.latency_s


@pytest.mark.parametrize(
    ("kind", "size", "group", "rates", "expected_s"),
    [
        # Sharded Matrices, pop quiz 2: bf16[2048, 8192] over 4 chips of a v5e, as a ring and as the line that it is.
        ("all-gather", 34e6, torus(RING), V5E, 377 * US),
        ("all-gather", 2048 * 8192 * 2, torus(OPEN), V5E, 560 * US),
        # Question 2: bf16[1024, 4096] on a cube of v4; over X while Y shards it, over X and Y.
        ("all-gather", 2 * 1024 * 4096 / 4, torus(RING), V4, 23.3 * US),
        ("all-gather", 2 * 1024 * 4096, torus(RING, RING), V4, 46.6 * US),
        ("all-reduce", 2 * 1024 * 4096, torus(RING), V4, 186.4 * US),
        # Question 3: 256 bytes over 4 chips in a ring are two hops.
        ("all-gather", 256, torus(RING), V4, 2 * US),
        # In one ring an all-to-all of V bytes in all is a quarter of their all-gather.
        ("all-to-all", 34e6 / 4, torus(RING), V5E, 377 / 4 * US),
        # A permute sends its bytes over one link, one way.
        ("permute", 45e6, torus(RING), V5E, 1e-3),
    ],
)
def test_torus(kind, size, group, rates, expected_s):
    assert seconds(kind, size, group, rates) == pytest.approx(expected_s, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "size", "group", "expected_s"),
    [
        # GPUs, quiz 2, question 3: bf16[4096, 65536] over a node.
        ("all-gather", 536e6, node(8), 1.04e-3),
        # Pop quiz 1: bf16[1024, 16384].
        ("all-gather", 2 * 1024 * 16384, node(8), 65 * US),
        ("all-reduce", 2 * 1024 * 16384, node(8), 130 * US),
        # B (N-1) / (W N^2) of B bytes in all.
        ("all-to-all", 1e9 / 8, node(8), 1e9 * 7 / (450e9 * 64)),
        # Over 32 nodes: bytes over 413 GB/s; with an axis of all 8 GPUs of a node, the same time for an eighth.
        ("all-gather", 1e9, node(8, 32), 1e9 / 413e9),
        ("all-gather", 1e9 / 8, node(1, 32), 1e9 / 413e9),
        # Pop quiz 3 with Y = 16: twice as fast as up to a node.
        ("all-gather", 1e9 / 16, node(1, 16), 1e9 / 16 * 15 / 16 / 50e9),
        # B (M-1) / (M^2 W_node) of B bytes in all.
        ("all-to-all", 1e9 / 16, node(8, 2), 1e9 / (4 * 400e9)),
        ("permute", 50e6, node(1, 2), 1e-3),
        ("permute", 450e6, node(8), 1e-3),
    ],
)
def test_switches(kind, size, group, expected_s):
    assert seconds(kind, size, group, H100, latency=False) == pytest.approx(expected_s, rel=0.01)


def test_an_all_to_all_over_two_nodes_is_more_than_four_times_one_over_a_node():
    # By bytes in all, as the book counts: B / (8 * 450e9) and B / (2 * 400e9).
    over_one = seconds("all-to-all", 1e9 / 8, node(8), H100, latency=False)
    over_two = seconds("all-to-all", 1e9 / 8, node(8, 2), H100, latency=False)
    assert over_two > 4 * over_one


def test_an_all_to_all_over_the_bisection_of_a_line():
    # 4 chips in an open line: 2 x b/2 go over the middle link one way, b bytes in total.
    assert seconds("all-to-all", 45e6, torus(OPEN), V5E) == pytest.approx(1e-3)
    assert seconds("all-to-all", 45e6, torus(RING), V5E) == pytest.approx(0.5e-3)
    # 3 chips: one sends to two, 2/3 b.
    assert seconds("all-to-all", 45e6, torus(Line(size=3)), V5E) == pytest.approx(2 / 3 * 1e-3)
    # Along two lines at once, the one with the busier bisection counts.
    assert seconds("all-to-all", 45e6, torus(OPEN, Line(size=2)), V5E) == pytest.approx(1e-3)
    # Rings of 4 in two dims: each chip's bytes take 2 hops on average, over 4 links.
    assert seconds("all-to-all", 45e6, torus(RING, RING), V5E) == pytest.approx(0.5e-3)


def test_shared_links_are_slower_and_latency_counts_physical_hops():
    shared = Line(size=2, stride=4, closed=True, sharing=4)
    assert seconds("all-gather", 45e6, torus(shared), V5E) == pytest.approx(4 * 0.5e-3)
    assert time_of("all-gather", 8, torus(shared), V5E) == Time(seconds=4e-6, latency_s=4e-6)


def test_inside_and_outside_overlap():
    slices = Group(inside=4, domains=2, lines=(RING,))
    # 1 MB: inside 1e6 / 90e9; outside half of it, a quarter by each device, at 3.125 GB/s.
    assert seconds("all-gather", 1e6, slices, V5E) == pytest.approx(1e6 / 2 / 4 / 3.125e9)


def test_an_all_to_all_over_slices_sends_inside_each_only_the_bytes_for_its_devices():
    # The links between slices take no time: of 1 MB half is for the other slice, and half goes over the own bisection.
    fast_out = replace(V5E, out_bytes_per_s=1e18)
    inside = torus(OPEN)
    assert seconds("all-to-all", 45e6, inside, fast_out) == pytest.approx(1e-3)
    for domains in (2, 4):
        over = replace(inside, domains=domains)
        assert seconds("all-to-all", 45e6, over, fast_out) == pytest.approx(1e-3 / domains)
    # The same on a switch: of the bytes that stay in the node, a device keeps an eighth.
    switch = replace(H100, out_bytes_per_s=1e18)
    assert seconds("all-to-all", 450e6, node(8, 2), switch, latency=False) == pytest.approx(0.5e-3 * 7 / 8)


@pytest.mark.parametrize(
    ("chips", "sizes", "axes", "flows"),
    [
        ("v5p:4x4x4", {"a": 4, "b": 16}, ["b"], 1),
        ("v5p:8x8x8", {"a": 8, "b": 2, "c": 32}, ["a"], 1),
        # Every other device of a ring: two groups share its links.
        ("v5p:4x4x4", {"a": 32, "b": 2}, ["a"], 2),
        ("v5p:8x4x4", {"c": 4, "a": 8, "b": 4}, ["a"], 1),
        ("v5p:8x4x4", {"a": 4, "b": 2, "c": 16}, ["a"], 2),
        ("v5p:8x4x4", {"a": 2, "b": 4, "c": 16}, ["a"], 4),
        # Over two axes, one of which is between the devices of another: the slowest hop counts.
        ("v5p:4x4x4", {"a": 16, "b": 2, "c": 2}, ["a", "b"], 2),
        ("v5p:4x4x4", {"a": 8, "b": 4, "c": 2}, ["a", "b"], 2),
    ],
)
def test_a_permute_takes_as_long_as_its_busiest_link(chips, sizes, axes, flows):
    """Every device of a mesh sends along its ring, and the messages of each link are counted."""
    mesh, machine = Mesh.of(**sizes), read_machine(chips)
    mapping = map_mesh(mesh, machine)
    assert busiest_link(mesh, mapping, axes) == flows
    rates = Rates.of(chip_of("v5p"), "used")
    expected_s = flows * 1e9 / rates.link_bytes_per_s
    assert seconds("permute", 1e9, mapping.group(axes), rates) == pytest.approx(expected_s)


def busiest_link(mesh: Mesh, mapping: MeshMapping, axes: list[str]) -> int:
    """Messages over the busiest link, one way, if each device sends to the next in the ring of the given axes."""
    links: Counter[tuple[tuple[int, ...], int, int]] = Counter()

    def place(at: Mapping[str, int]) -> list[int]:
        where = [0] * len(mapping.dims)
        for axis, index in at.items():
            for segment in mapping.segments[axis]:
                index, step = divmod(index, segment.size)
                where[segment.dim] += step * segment.stride
        return where

    for device in range(mesh.num_devices):
        at = mesh.coordinates(device)
        after = dict(at)
        for axis in reversed(axes):
            after[axis] = (at[axis] + 1) % mesh.size(axis)
            if after[axis]:
                break
        here, there = place(at), place(after)
        for dim, of in enumerate(mapping.dims):
            forward = (there[dim] - here[dim]) % of.size
            direction = 1 if (2 * forward <= of.size if of.wraps else there[dim] > here[dim]) else -1
            while here[dim] != there[dim]:
                links[tuple(here), dim, direction] += 1
                here[dim] = (here[dim] + direction) % of.size
    return max(links.values())


def test_what_has_no_figure_has_no_time():
    mi325x = Rates.of(chip_of("mi325x"), "used")
    assert time_of("all-gather", 10**6, node(8), mi325x) is not None
    assert time_of("all-gather", 10**6, node(8, 2), mi325x) is None


def test_small_collectives_are_latency_bound():
    small, large = (time_of("all-gather", size, node(8), H100) for size in (10**3, 10**9))
    assert small is not None
    assert large is not None
    assert small.is_latency_bound
    assert not large.is_latency_bound
    assert time_of("all-gather", 10**9, node(1), H100) == Time(seconds=0.0, latency_s=0.0)


lines = st.builds(
    Line, size=st.integers(2, 16), closed=st.booleans(), stride=st.just(1), sharing=st.sampled_from([1, 2, 4])
)
groups = st.one_of(
    st.lists(lines, min_size=1, max_size=3).map(lambda ones: (torus(*ones), V5E)),
    st.builds(lambda inside, domains: (node(inside, domains), H100), st.integers(1, 8), st.integers(1, 16)),
)


@given(groups, st.sampled_from(KINDS), st.integers(1, 10**10), st.integers(1, 10**10))
def test_more_bytes_are_never_faster(where, kind, size, more):
    group, rates = where
    assert seconds(kind, size, group, rates) <= seconds(kind, size + more, group, rates)


@given(groups, st.integers(1, 10**10))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(where, size):
    group, rates = where
    halves = [seconds(kind, size, group, rates, latency=rates.is_torus) for kind in ("reduce-scatter", "all-gather")]
    assert seconds("all-reduce", size, group, rates, latency=rates.is_torus) == pytest.approx(sum(halves))


@given(st.integers(3, 64), st.integers(10**3, 10**10))
def test_a_ring_is_never_slower_than_a_line(size, sent):
    for kind in KINDS:
        closed, opened = (seconds(kind, sent, torus(Line(size=size, closed=c)), V5E) for c in (True, False))
        assert closed <= opened * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_faster_links_are_never_slower(kind):
    for chip in (chip_of("v5e"), chip_of("h100")):
        group = torus(OPEN) if chip.network == "torus" else node(8)
        fastest, used, slowest = (
            seconds(kind, 1e8, group, Rates.of(chip, reading)) for reading in ("fastest", "used", "slowest")
        )
        assert fastest < slowest
        assert fastest <= used <= slowest
