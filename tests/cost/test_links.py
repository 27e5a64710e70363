"""Which links the axes of a mesh use: tables of groups, and counts of devices checked against the mesh."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.mesh.hops import SubGroup
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.cost import read_machine
from shardwright.cost.hardware.links import Line, map_mesh

RING4 = Line(size=4, closed=True)


def on_switch(chips: str, **sizes: int):
    mapping = map_mesh(Mesh.of(**sizes), read_machine(chips))
    return {axis: (mapping.group([axis]).inside, mapping.group([axis]).domains) for axis in sizes}


def on_torus(chips: str, *axes: str, **sizes: int):
    return map_mesh(Mesh.of(**sizes), read_machine(chips)).group(axes).lines


@pytest.mark.parametrize(
    ("chips", "sizes", "groups"),
    [
        ("h100:16x8", {"fsdp": 16, "tensor": 8}, {"fsdp": (1, 16), "tensor": (8, 1)}),
        ("h100:16x8", {"tensor": 8, "fsdp": 16}, {"tensor": (1, 8), "fsdp": (8, 2)}),
        ("h100:2x8", {"data": 2, "fsdp": 2, "tensor": 4}, {"data": (1, 2), "fsdp": (2, 1), "tensor": (4, 1)}),
        ("h100:2x4", {"fsdp": 8}, {"fsdp": (4, 2)}),
        ("gb200:2x72", {"fsdp": 2, "expert": 72}, {"fsdp": (1, 2), "expert": (72, 1)}),
        # Groups of 3 are split differently between nodes of 8: they count as outside.
        ("h100:3x8", {"fsdp": 8, "tensor": 3}, {"fsdp": (1, 8), "tensor": (1, 3)}),
        # An axis of 16 has 8 in each node, and the axis of 2 before it is entirely outside.
        ("h100:4x8", {"data": 2, "fsdp": 16}, {"data": (1, 2), "fsdp": (8, 2)}),
    ],
)
def test_groups_of_a_node(chips, sizes, groups):
    assert on_switch(chips, **sizes) == groups


def test_several_axes_are_one_group():
    group = map_mesh(Mesh.of(fsdp=16, tensor=8), read_machine("h100:16x8")).group(["fsdp", "tensor"])
    assert (group.inside, group.domains, group.size) == (8, 16, 128)


def test_a_cube_is_three_rings_and_slices_are_outside():
    mapping = map_mesh(Mesh.of(data=2, fsdp=64), read_machine("v5p:4x4x4*2"))
    assert mapping.group(["fsdp"]).lines == (RING4,) * 3
    assert (mapping.group(["data"]).inside, mapping.group(["data"]).domains) == (1, 2)


@pytest.mark.parametrize("which", ["minor", "major"])
@pytest.mark.parametrize("minor", [4, 16])
def test_a_sub_group_of_an_axis_has_the_lines_of_its_devices(which, minor):
    mapping = map_mesh(Mesh.of(fsdp=64), read_machine("v5p:4x4x4"))
    subgroup = SubGroup(sizes=(64 // minor, minor), over=(1 if which == "minor" else 0,))
    group = mapping.group(["fsdp"], subgroup)
    assert group.lines == (RING4,) * (1 if subgroup.size == 4 else 2)
    # The devices of the first sub-group: the digits of a device's number are its coordinates on the torus.
    places = [(device // 16, device // 4 % 4, device % 4) for device in subgroup.groups[0]]
    spread = [len({place[dim] for place in places}) for dim in range(3)]
    assert sorted(size for size in spread if size > 1) == [line.size for line in group.lines]
    assert (group.inside, group.domains) == (len(places), 1)


def test_a_dcn_axis_is_outside_at_any_place_in_the_mesh():
    mesh = Mesh((Axis(name="fsdp", size=64), Axis(name="data", size=2, link="dcn")))
    mapping = map_mesh(mesh, read_machine("v5p:4x4x4*2"))
    assert mapping.domains == {"fsdp": 1, "data": 2}
    assert map_mesh(Mesh.of(fsdp=64, data=2), read_machine("v5p:4x4x4*2")).domains == {"fsdp": 2, "data": 1}


@pytest.mark.parametrize(
    ("chips", "sizes", "axis", "lines"),
    [
        # A dim of a v5e wraps around at 16 chips, of a v5p at every multiple of 4.
        ("v5e:4x4", {"x": 4, "y": 4}, "y", (Line(size=4),)),
        ("v5e:16x16", {"x": 16, "y": 16}, "y", (Line(size=16, closed=True),)),
        ("v6e:8x16", {"x": 8, "y": 16}, "x", (Line(size=8),)),
        ("v5p:4x4x4", {"x": 16, "y": 4}, "x", (RING4, RING4)),
        ("v5p:2x4x4", {"x": 2, "y": 16}, "y", (RING4, RING4)),
        ("v5p:2x4x4", {"x": 2, "y": 16}, "x", (Line(size=2),)),
        # An axis that takes a part of a ring has an open line; the other axis goes around it with a larger stride.
        ("v5p:8x8x8", {"fsdp": 128, "expert": 4}, "expert", (Line(size=4),)),
        (
            "v5p:8x8x8",
            {"fsdp": 128, "expert": 4},
            "fsdp",
            (Line(size=2, stride=4, closed=True, sharing=4), Line(size=8, closed=True), Line(size=8, closed=True)),
        ),
        # The axis of 4 takes the entire dim of 4, at any place in the shape.
        ("v5p:4x4x8", {"fsdp": 32, "tensor": 4}, "tensor", (RING4,)),
        ("v5p:4x4x8", {"fsdp": 16, "tensor": 8}, "tensor", (Line(size=8, closed=True),)),
        # Two devices of one chip share its links: each of their groups has half.
        ("tpu7x:4x4x4", {"fsdp": 64, "tensor": 2}, "fsdp", (Line(size=4, closed=True, sharing=2),) * 3),
        ("tpu7x:4x4x4", {"fsdp": 64, "tensor": 2}, "tensor", (Line(size=2, on_chip=True),)),
        # A segment that does not fit a dim is a separate line.
        ("v5e:2x3", {"x": 2, "y": 3}, "y", (Line(size=3),)),
        ("v5e:4x3", {"x": 2, "y": 6}, "y", (Line(size=2), Line(size=3))),
    ],
)
def test_lines_of_a_torus(chips, sizes, axis, lines):
    assert sorted(on_torus(chips, axis, **sizes), key=str) == sorted(lines, key=str)


def test_axes_that_divide_a_dim_have_one_line_over_all_of_it():
    assert on_torus("v5p:8x8x8", "fsdp", "expert", fsdp=128, expert=4) == (Line(size=8, closed=True),) * 3
    mapping = map_mesh(Mesh.of(fsdp=128, expert=4), read_machine("v5p:8x8x8"))
    assert mapping.is_part_of_ring("expert")
    assert not mapping.is_part_of_ring("fsdp")


def test_hops_to_the_farthest():
    assert [RING4.hops, Line(size=4).hops, Line(size=2, stride=4, closed=True).hops, Line(size=3).hops] == [2, 3, 4, 2]


SHAPES = ("v5p:4x4x4", "v5p:4x4x8*2", "v5e:4x8", "tpu7x:2x2x4", "h100:4x8", "gb200:2x72", "v6e:16x16")


@given(shape=st.sampled_from(SHAPES), data=st.data())
def test_a_group_has_as_many_devices_as_its_axis(shape, data):
    machine = read_machine(shape)
    sizes, rest = [], machine.num_devices
    while rest > 1 and len(sizes) < 4:
        sizes.append(data.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0])))
        rest //= sizes[-1]
    mesh = Mesh.of(**{f"a{n}": size for n, size in enumerate((*sizes, rest))})
    mapping = map_mesh(mesh, machine)
    in_domain = machine.num_devices // (machine.slices if mapping.dims else machine.shape[0])
    for axis in mesh.names:
        group = mapping.group([axis])
        assert group.size == mesh.size(axis)
        assert not mapping.dims or prod(line.size for line in group.lines) == group.inside
        # Counted over the devices: no group spans more domains than its axis.
        for device in {0, machine.num_devices // 2, machine.num_devices - 1}:
            assert len({member // in_domain for member in mesh.group(device, [axis])}) <= group.domains
