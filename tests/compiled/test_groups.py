"""Replica groups in every form that compilers write: by hand and compared with NumPy; and the axes of the groups."""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiled.text.groups import Groups, axes_along, replica_groups, source_target_pairs
from shardwright.compiled.text.numbering import numbering
from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Axis, Mesh

EXPERT, FSDP = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
GROUPS: dict[str, Groups] = {
    "{{0,1,2,3},{4,5,6,7}}": EXPERT,
    "{{0,4},{1,5},{2,6},{3,7}}": FSDP,
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": EXPERT,
    "[4,2]<=[2,4]T(1,0)": FSDP,
    "[2,4]<=[4,2]T(1,0)": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "[4,2]<=[2,2,2]T(2,1,0)": ((0, 4), (2, 6), (1, 5), (3, 7)),
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": EXPERT,
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": FSDP,
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1','axis_0'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['axis_0'=8,'axis_1'=1] {'axis_0'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}": FSDP,
    "mesh['axis_0'=4,'axis_1'=2], device_ids=([8]<=[2,4]T(1,0)) {'axis_1'}": FSDP,
    "mesh['axis_0'=2,'axis_1'=4], device_ids=(7,6,5,4,3,2,1,0) {'axis_1'}": ((7, 6, 5, 4), (3, 2, 1, 0)),
    "mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
}


@pytest.mark.parametrize(("text", "groups"), GROUPS.items(), ids=GROUPS)
def test_groups(text: str, groups: Groups) -> None:
    assert replica_groups(f"%x), channel_id=3, replica_groups={text}, dimensions={{0}}", 8) == groups


def test_a_text_without_groups() -> None:
    assert replica_groups("%x), channel_id=3", 4) == ((0, 1, 2, 3),)
    assert source_target_pairs("%x), channel_id=3") is None
    assert source_target_pairs("%x), channel_id=2, source_target_pairs={{0,1},{1,2}}") == ((0, 1), (1, 2))
    sent = '%x), frontend_attributes={_xla_send_recv_source_target_pairs="{{3,0}}"}'
    assert source_target_pairs(sent) == ((3, 0),)


def test_a_form_that_is_not_known() -> None:
    with pytest.raises(InputError) as error:
        replica_groups("%x), replica_groups=<every other device>, dimensions={0}", 8)
    assert str(error.value) == (
        "The program has device groups in a form that this version does not know: "
        "'replica_groups=<every other device>, dimensions={0}'."
    )


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A shape, a permutation of its dims, and the length of a row of the transposed numbers."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    perm = draw(st.permutations(range(len(sizes))))
    taken = draw(st.integers(0, len(sizes)))
    return sizes, list(perm), prod(sizes[dim] for dim in perm[taken:])


@given(laid_out())
def test_iota_groups_equal_those_of_numpy(case: tuple[list[int], list[int], int]) -> None:
    sizes, perm, length = case
    expected = np.arange(prod(sizes)).reshape(sizes).transpose(perm).reshape(-1, length)
    text = f"[{expected.shape[0]},{length}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, perm))})"
    assert replica_groups(f"%x), replica_groups={text}", prod(sizes)) == tuple(map(tuple, expected.tolist()))


@given(laid_out(), st.data())
def test_groups_along_a_compilers_mesh_equal_those_of_numpy(
    case: tuple[list[int], list[int], int], data: st.DataObject
) -> None:
    sizes, perm, _ = case
    along = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    order = np.arange(prod(sizes)).reshape([sizes[dim] for dim in perm])
    devices = order.transpose(np.argsort(perm))
    others = [dim for dim in range(len(sizes)) if dim not in along]
    expected = devices.transpose(others + along).reshape(-1, prod(sizes[dim] for dim in along))
    mesh = ",".join(f"'axis_{dim}'={size}" for dim, size in enumerate(sizes))
    ids = f"[{','.join(map(str, order.shape))}]T({','.join(map(str, np.argsort(perm)))})"
    named = ",".join(f"'axis_{dim}'" for dim in along)
    text = f"mesh[{mesh}], device_ids=({ids}) {{{named}}}"
    assert replica_groups(f"%x), replica_groups={text}", prod(sizes)) == tuple(map(tuple, expected.tolist()))


MESH = Mesh.of(data=1, fsdp=2, expert=4, tensor=3)
SUBSETS = [axes for number in range(5) for axes in combinations(MESH.names, number)]


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
def test_axes_of_the_groups_of_any_axes(axes: tuple[str, ...]) -> None:
    groups = tuple({MESH.group(device, axes) for device in range(MESH.num_devices)})
    assert axes_along(groups, MESH.names, tuple(MESH.shape.values())) == MESH.larger_than_one(axes)


def test_axes_of_a_part_of_an_axis() -> None:
    names, sizes = ("fsdp", "tensor"), (4, 2)
    assert axes_along(((0, 4), (1, 5), (2, 6), (3, 7)), names, sizes) == ("fsdp",)
    # A permute that transposes a mesh moves along all its axes.
    transposed = ((0, 0), (1, 2), (2, 4), (3, 6), (4, 1), (5, 3), (6, 5), (7, 7))
    assert axes_along(transposed, names, sizes) == ("fsdp", "tensor")
    # The end of a ring may be missing.
    assert axes_along(((0, 2), (2, 4), (4, 6)), names, sizes) == ("fsdp",)


def test_thousands_of_devices() -> None:
    names, sizes = ("data", "fsdp", "expert", "tensor"), (4, 32, 8, 4)
    groups = replica_groups("%x), replica_groups=[128,32]<=[4,32,8,4]T(0,2,3,1)", 4096)
    assert groups[0] == tuple(range(0, 1024, 32))
    assert axes_along(groups, names, sizes) == ("fsdp",)


def test_a_program_for_one_slice_of_several() -> None:
    """Devices are numbered inside a slice; the axis across slices is that with ``link: dcn``, else the major one."""
    named = Mesh((Axis(name="fsdp", size=8), Axis(name="data", size=2, link="dcn")))
    found = numbering(named, 8)
    assert (found.num_slices, found.across_slices, found.axes(((0, 1, 2, 3, 4, 5, 6, 7),))) == (2, ("data",), ("fsdp",))
    shared = numbering(Mesh.of(fsdp=8, tensor=2), 4)
    assert (shared.num_slices, shared.across_slices) == (4, ("fsdp",))
    assert (shared.axes(((0, 2), (1, 3))), shared.axes(((0, 1), (2, 3)))) == (("fsdp",), ("tensor",))


def test_a_program_for_other_devices_than_the_mesh_has() -> None:
    with pytest.raises(InputError) as error:
        numbering(Mesh.of(fsdp=6), 4)
    assert str(error.value) == (
        "The program is for 4 devices, and the mesh fsdp 6 has 6, which is not a multiple of 4: read the program "
        "with the mesh that it was compiled for."
    )
