"""Placements predicted from a spec, over every order of axes, against rows listed one by one."""

from itertools import permutations, product
from random import Random

import pytest

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.boxes.placements import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    misnamed_dims,
    placements_of,
)
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.spec import Spec
from tests.core.placed import placed_boxes, placement_boxes

MESH = Mesh.of(x=2, y=3, z=4)


def every_order(mesh: Mesh) -> list[Spec]:
    """Every order of every subset of axes, divided between two dims in every way."""
    orders = [order for n in range(len(mesh.axes) + 1) for order in permutations(mesh.names, n)]
    return [Spec.of(heads=order[:n], embed=order[n:]) for order in orders for n in range(len(order) + 1)]


def chunk(rows: list[int], number: int) -> list[list[int]]:
    """The result of torch.chunk, filled up with empty chunks."""
    part = max(1, -(-len(rows) // number))
    return [rows[i * part : (i + 1) * part] for i in range(number)]


def rows_by_definition(placements: tuple[Placement, ...], mesh: Mesh, shape: tuple[int, ...]) -> list[list[list[int]]]:
    """For each device the rows of each dim, by walking the placements from left to right."""
    devices = []
    for indices in product(*(range(axis.size) for axis in mesh.axes)):
        rows = [list(range(size)) for size in shape]
        for placement, axis, index in zip(placements, mesh.axes, indices, strict=True):
            if isinstance(placement, Shard):
                rows[placement.dim] = chunk(rows[placement.dim], axis.size)[index]
            elif isinstance(placement, StridedShard):
                split = chunk(rows[placement.dim], placement.split_factor)
                rows[placement.dim] = [row for piece in split for row in chunk(piece, axis.size)[index]]
        devices.append(rows)
    return devices


def boxes_of(rows: list[list[int]]) -> list[Box]:
    """The fewest boxes that hold these rows of each dim."""
    corners = [
        list(zip([r for r in dim if r - 1 not in dim], [r + 1 for r in dim if r + 1 not in dim], strict=True))
        for dim in rows
    ]
    return [Box(tuple(a for a, _ in corner), tuple(b for _, b in corner)) for corner in product(*corners)]


def test_there_are_49_orders_of_three_axes_over_two_dims() -> None:
    assert len(every_order(MESH)) == 49


@pytest.mark.parametrize("mesh_order", list(permutations(MESH.axes)), ids=lambda axes: "-".join(a.name for a in axes))
def test_predicted_placements_give_the_boxes_of_the_spec(mesh_order: tuple[Axis, ...]) -> None:
    """All orders of the axes on the dims, on all orders of the mesh: one box for each device, that of the spec."""
    mesh, shape = Mesh(mesh_order), (48, 24)
    for spec in every_order(mesh):
        placements = placements_of(spec, mesh)
        assert placed_boxes(placements, mesh, shape) == owned_boxes(spec, mesh, shape), (str(spec), placements)
        assert misnamed_dims(spec, mesh, shape) == ()


def test_the_split_factor_counts_what_is_more_major_but_later() -> None:
    expected = {
        ("x", "y", "z"): "S(0) S(0) S(0)",
        ("x", "z", "y"): "S(0) _S(0, 4) S(0)",
        ("y", "x", "z"): "_S(0, 3) S(0) S(0)",
        ("y", "z", "x"): "_S(0, 12) S(0) S(0)",
        ("z", "x", "y"): "_S(0, 4) _S(0, 4) S(0)",
        ("z", "y", "x"): "_S(0, 12) _S(0, 4) S(0)",
    }
    for order, text in expected.items():
        assert " ".join(map(str, placements_of(Spec.of(heads=order), MESH))) == text
    assert placements_of(Spec.of(heads=["z"], embed=["y"]), MESH) == (Replicate(), Shard(1), Shard(0))


def test_an_axis_of_size_one_makes_nothing_strided() -> None:
    mesh = Mesh.of(fsdp=4, tensor=1)
    assert placements_of(Spec.of(heads=["tensor", "fsdp"]), mesh) == (Shard(0), Shard(0))


def test_any_placements_give_the_rows_of_the_definition() -> None:
    """Any split factors on any sizes: also rows with gaps, uneven shards and empty ones."""
    random = Random(0)
    gaps = empty = 0
    for _ in range(1000):
        mesh = Mesh(tuple(Axis(name=name, size=random.randint(1, 4)) for name in "abc"[: random.randint(1, 3)]))
        shape = tuple(random.randint(0, 14) for _ in range(random.randint(1, 2)))
        placements = tuple(
            random.choice(
                [Replicate(), Shard(dim := random.randrange(len(shape))), StridedShard(dim, random.randint(1, 5))]
            )
            for _ in mesh.axes
        )
        for device, rows in enumerate(rows_by_definition(placements, mesh, shape)):
            boxes = placement_boxes(placements, mesh, shape, device)
            assert list(boxes) == boxes_of(rows), (placements, str(mesh), shape, device)
            gaps += len(boxes) > 1
            empty += not boxes
    assert gaps > 200
    assert empty > 200


MISNAMED = {  # (tensor, fsdp): sizes up to 64 of which FSDP2 holds other rows than its placements name
    (2, 3): (7, 13, 19, 25, 31, 37, 43, 49, 55, 61),
    (2, 4): (9, 17, 25, 33, 41, 49, 57),
    (2, 8): (17, 33, 49),
    (3, 3): (11, 20, 29, 38, 47, 56),
    (3, 4): (14, 16, 25, 26, 28, 37, 38, 40, 49, 50, 52, 61, 62, 64),
    (3, 8): (25, 26, 28, 49, 50, 52),
    (4, 3): (15, 27, 39, 51, 63),
    (4, 4): (19, 22, 34, 35, 38, 50, 51, 54),
    (4, 8): (33, 34, 35, 37, 38, 41),
    (8, 3): (27, 31, 55),
    (8, 4): (34, 39, 46),
}


def test_71_of_1024_uneven_layouts_are_misnamed() -> None:
    """FSDP2 after tensor parallelism, as measured with PyTorch 2.13: 71 layouts, none where `tensor` divides."""
    spec, count = Spec.of(heads=["tensor", "fsdp"], embed=[]), 0
    for tensor, fsdp in product((2, 3, 4, 8), repeat=2):
        mesh = Mesh.of(fsdp=fsdp, tensor=tensor)
        found = tuple(size for size in range(1, 65) if misnamed_dims(spec, mesh, (size, 4)) == (0,))
        assert found == MISNAMED.get((tensor, fsdp), ())
        assert all(size % tensor for size in found)
        count += len(found)
    assert count == 71


def test_misnamed_dims_are_those_whose_rows_differ() -> None:
    """The shortcut by dims agrees with a comparison of the boxes of all devices, on three axes."""
    differ = 0
    for order, size in product(permutations(MESH.names), range(1, 50)):
        spec = Spec.of(embed=[], heads=order)
        held = owned_boxes(spec, MESH, (2, size), in_turn=MESH.names)
        same = held == placed_boxes(placements_of(spec, MESH), MESH, (2, size))
        assert misnamed_dims(spec, MESH, (2, size)) == (() if same else (1,)), (order, size)
        differ += not same
    assert differ > 20
