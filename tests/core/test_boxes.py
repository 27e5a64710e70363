"""Boxes against a definition that lists every row, and the order of axes on a dim against its purpose."""

from itertools import product
from math import prod
from random import Random

import pytest

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import (
    Owned,
    owned_boxes,
    saves,
    shard_box,
)
from shardwright.core.boxes.coverage import coverage
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.spec import DimSpec, Spec
from tests.core.received import held_boxes, intersections, received, receiving_from_outside

ALONE = {"jax": lambda _: 0, "dtensor": lambda number: number, "fully_shard": lambda number: number // 2}
"""How many axes of a dim have a split of their own: under ``fully_shard`` those in use, here the more major half."""


def in_turn(spec: Spec, rule: str) -> tuple[str, ...]:
    return tuple(axis for dim in spec.dims for axis in dim.axes[: ALONE[rule](len(dim.axes))])


def chunk(rows: list[int], number: int) -> list[list[int]]:
    """The result of torch.chunk, filled up with empty chunks."""
    part = max(1, -(-len(rows) // number))
    return [rows[i * part : (i + 1) * part] for i in range(number)]


def rows_by_definition(size: int, axes: list[tuple[int, int]], alone: int) -> list[int]:
    """The rows of one dim left by axes of (size, index), major first. The first ``alone`` of them chunk one after the other,
    all others as one axis over their positions."""
    rows = list(range(size))
    for number, index in axes[:alone]:
        rows = chunk(rows, number)[index]
    positions = list(product(*(range(number) for number, _ in axes[alone:])))
    return chunk(rows, len(positions))[positions.index(tuple(index for _, index in axes[alone:]))]


def by_definition(spec: Spec, mesh: Mesh, shape: tuple[int, ...], rule: str) -> list[list[list[int]]]:
    """For each device, the rows of each dim that it owns."""
    devices = list(product(*(range(axis.size) for axis in mesh.axes)))
    here = [dict(zip((axis.name for axis in mesh.axes), indices, strict=True)) for indices in devices]
    sizes = {axis.name: axis.size for axis in mesh.axes}
    return [
        [
            rows_by_definition(size, [(sizes[axis], at[axis]) for axis in dim.axes], ALONE[rule](len(dim.axes)))
            for dim, size in zip(spec.dims, shape, strict=True)
        ]
        for at in here
    ]


def random_case(random: Random) -> tuple[Spec, Mesh, tuple[int, ...]]:
    """1 to 4 axes, each on some dim or on none, in any order; 0 to 4 dims, about half of them divided by their axes."""
    mesh = Mesh(tuple(Axis(name=name, size=random.randint(1, 4)) for name in "abcd"[: random.randint(1, 4)]))
    axes = random.sample(mesh.names, len(mesh.names))
    dims: list[list[str]] = [[] for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4)))]
    for axis in axes:
        if dims and random.random() < 0.8:
            random.choice(dims).append(axis)
    shape = tuple(
        mesh.size(axes) * random.randint(1, 3) if random.random() < 0.5 else random.randint(1, 30) for axes in dims
    )
    return Spec(tuple(DimSpec(f"dim{n}", tuple(axes)) for n, axes in enumerate(dims))), mesh, shape


def random_cases(count: int, seed: int) -> list[tuple[Spec, Mesh, tuple[int, ...]]]:
    random = Random(seed)
    return [random_case(random) for _ in range(count)]


def box_of(rows: list[list[int]]) -> Box | None:
    """The box of these rows, which must be contiguous."""
    if not all(rows):
        return None
    assert all(dim == list(range(dim[0], dim[-1] + 1)) for dim in rows)
    return Box(tuple(dim[0] for dim in rows), tuple(dim[-1] + 1 for dim in rows))


def divides(spec: Spec, mesh: Mesh, shape: tuple[int, ...]) -> bool:
    return all(size % mesh.size(dim.axes) == 0 for dim, size in zip(spec.dims, shape, strict=True))


def in_mesh_order(spec: Spec, mesh: Mesh) -> bool:
    return all(dim.axes == mesh.in_mesh_order(dim.axes) for dim in spec.dims)


def test_boxes_of_random_specs_are_those_of_the_definition() -> None:
    cases = random_cases(2500, seed=1)
    for spec, mesh, shape in cases:
        for rule in ALONE:
            expected = [box_of(rows) for rows in by_definition(spec, mesh, shape, rule)]
            alone = in_turn(spec, rule)
            found = [shard_box(spec, mesh, shape, device, alone) for device in range(mesh.num_devices)]
            assert found == expected, (str(spec), str(mesh), shape, rule)
            assert owned_boxes(spec, mesh, shape, alone) == tuple(() if b is None else (b,) for b in expected)
    # The cases are worth having: many of each kind, and empty shards among them.
    assert sum(not divides(*case) for case in cases) > 700
    assert sum(not in_mesh_order(spec, mesh) for spec, mesh, _ in cases) > 500
    assert sum(() in owned_boxes(*case) for case in cases) > 100


def test_the_three_rules_agree_if_the_axes_divide() -> None:
    differ = 0
    for case in random_cases(2000, seed=2):
        owned = {owned_boxes(*case, in_turn(case[0], rule)) for rule in ALONE}
        if divides(*case):
            assert len(owned) == 1, case
        differ += len(owned) == 3
    assert differ > 5


def test_a_dim_too_small_for_its_axes_leaves_the_last_devices_with_nothing() -> None:
    mesh, spec = Mesh.of(data=2, fsdp=4), Spec.of(embed=["data", "fsdp"])
    assert [shard_box(spec, mesh, (5,), device) for device in range(5, 8)] == [None] * 3
    nested = owned_boxes(spec, mesh, (5,), in_turn=spec.axes)
    assert [" ".join(map(str, boxes)) for boxes in nested] == ["0:1", "1:2", "2:3", "", "3:4", "4:5", "", ""]
    assert owned_boxes(spec, mesh, (0,)) == ((),) * 8


def test_a_scalar_is_one_box_on_every_device() -> None:
    assert owned_boxes(Spec(()), Mesh.of(data=3), ()) == ((Box((), ()),),) * 3


def test_a_spec_of_another_rank_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        shard_box(Spec.of(embed=[]), Mesh.of(data=2), (4, 4), 0)


def test_distinct_boxes_cover_the_tensor_once_and_their_holders_are_the_replica_groups() -> None:
    for spec, mesh, shape in random_cases(400, seed=3):
        for rule in ALONE:
            held = held_boxes(owned_boxes(spec, mesh, shape, in_turn(spec, rule)))
            assert coverage([one.box for one in held], shape).exact, (str(spec), str(mesh), shape)
            free = [axis for axis in mesh.names if axis not in spec.axes]
            for one in held:
                assert one.devices == mesh.group(one.devices[0], free)
                assert [device for device in one.devices if saves(spec, mesh, device)] == [one.devices[0]]


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def cells_of(owned: Owned) -> list[set[tuple[int, ...]]]:
    return [set().union(*map(cells, boxes)) for boxes in owned]


def test_intersections_are_each_requested_index_once_from_the_box_that_stores_it() -> None:
    random = Random(4)
    compared = 0
    while compared < 200:
        (spec, mesh, shape), other_axes = random_case(random), Mesh.of(x=random.randint(1, 4), y=random.randint(1, 4))
        if not shape or prod(shape) > 3000:
            continue
        stored = [one.box for one in held_boxes(owned_boxes(spec, mesh, shape))]
        other = Spec(
            (DimSpec("dim0", ("y", "x")), *(DimSpec(dim.logical_axis) for dim in spec.dims[1:])),
        )
        for target in (one.box for one in held_boxes(owned_boxes(other, other_axes, shape, in_turn=other.axes))):
            found = intersections(target, stored)
            assert all(stored[piece.index].contains(piece.region) for piece in found)
            assert sum(piece.region.size for piece in found) == target.size
            assert set().union(*(cells(piece.region) for piece in found)) == cells(target)
        compared += 1


def test_received_is_what_is_needed_and_not_held_and_every_holder_has_it() -> None:
    random = Random(5)
    compared = 0
    while compared < 200:
        source, mesh, shape = random_case(random)
        axes = random.sample(source.axes, len(source.axes))
        if not shape or prod(shape) * mesh.num_devices > 30_000:
            continue
        names = list(source.logical_axes)
        target = Spec.build(names, {names[0]: axes[: len(axes) // 2], names[-1]: axes[(len(axes) + 1) // 2 :]})
        if len(names) == 1:
            target = Spec.build(names, {names[0]: axes})
        before, after = owned_boxes(source, mesh, shape), owned_boxes(target, mesh, shape)
        have, need = cells_of(before), cells_of(after)
        for device, regions in enumerate(received(before, after)):
            missing = [cells(one.region) for one in regions]
            assert set().union(*missing) == need[device] - have[device]
            assert sum(map(len, missing)) == len(need[device] - have[device])
            for one in regions:
                holders = tuple(d for d in range(mesh.num_devices) if cells(one.region) <= have[d])
                assert one.holders == holders
        compared += 1


MESHES = (Mesh.of(fsdp=2, expert=4), Mesh.of(expert=4, fsdp=2))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("right", "wrong", "after"),
    [
        # An all-gather over `expert`: the batch of `residual` is sharded by both axes.
        ({"batch": ["fsdp", "expert"]}, {"batch": ["expert", "fsdp"]}, {"batch": ["fsdp"]}),
        # A change of component: `expert` shards the batch, then the experts (all-to-all).
        ({"batch": ["fsdp", "expert"]}, {"batch": ["expert", "fsdp"]}, {"batch": ["fsdp"], "experts": ["expert"]}),
        # A weight at rest: `expert` is persistent, `fsdp` is gathered.
        ({"experts": ["expert", "fsdp"]}, {"experts": ["fsdp", "expert"]}, {"experts": ["expert"]}),
    ],
    ids=["gather", "all-to-all", "weight"],
)
def test_persistent_axes_come_before_gathered_axes(
    mesh: Mesh, right: dict[str, list[str]], wrong: dict[str, list[str]], after: dict[str, list[str]]
) -> None:
    """In the right order no device receives data from outside the gathered axis's group; in the wrong one all 8 do."""
    dims, shape = ("batch", "experts", "embed"), (16, 16, 8)
    (name,) = right
    gathered = [axis for axis in right[name] if axis not in after[name]]
    boxes = {key: owned_boxes(Spec.build(dims, axes), mesh, shape) for key, axes in
             {"right": right, "wrong": wrong, "after": after}.items()}  # fmt: skip
    assert receiving_from_outside(boxes["right"], boxes["after"], mesh, gathered) == ()
    assert receiving_from_outside(boxes["wrong"], boxes["after"], mesh, gathered) == tuple(range(8))
    # The same without the function under test, from the rows themselves.
    have, need = cells_of(boxes["wrong"]), cells_of(boxes["after"])
    for device in range(8):
        group = mesh.group(device, gathered)
        assert need[device] - set().union(*(have[member] for member in group))


def test_gathers_over_the_last_axes_never_leave_their_group() -> None:
    """On random specs and meshes: any last axes of each dim are gathered, on dims that are divided or chunked."""
    random = Random(6)
    for spec, mesh, shape in random_cases(500, seed=7):
        kept = Spec(tuple(DimSpec(d.logical_axis, d.axes[: random.randint(0, len(d.axes))]) for d in spec.dims))
        gathered = set(spec.axes) - set(kept.axes)
        # Kept axes have a split of their own, as those in use have under ``fully_shard``.
        before, after = (owned_boxes(one, mesh, shape, in_turn=kept.axes) for one in (spec, kept))
        assert receiving_from_outside(before, after, mesh, gathered) == (), (str(spec), str(kept), str(mesh), shape)


def test_padded_boxes_of_an_uneven_dim_overlap_two_groups() -> None:
    mesh = MESHES[0]
    before, after = (owned_boxes(Spec.of(batch=axes), mesh, (9,)) for axes in (["fsdp", "expert"], ["fsdp"]))
    assert receiving_from_outside(before, after, mesh, ["expert"]) == (4, 5, 6, 7)
