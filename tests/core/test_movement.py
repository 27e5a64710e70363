"""Steps between two specs by hand, and their sizes against boxes."""

from __future__ import annotations

from random import Random

import pytest

from shardwright.core.boxes.boxes import owned_boxes
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.mesh.notation import parse
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.movement import Collective, elements_per_device, movement, reshard_steps

NAMES = ("x", "y", "z")


def any_spec(random: Random, mesh: Mesh) -> Spec:
    axes_of: dict[str, list[str]] = {name: [] for name in NAMES}
    for axis in random.sample(mesh.names, len(mesh.names)):
        if name := random.choice((*NAMES, None)):
            axes_of[name].append(axis)
    return Spec.build(NAMES, axes_of)


def test_a_device_holds_no_more_than_the_largest_box() -> None:
    random = Random(0)
    uneven = 0
    for _ in range(500):
        mesh = Mesh(tuple(Axis(name=name, size=random.randint(1, 4)) for name in "abc"))
        spec, shape = any_spec(random, mesh), {name: random.randint(1, 13) for name in NAMES}
        held = [sum(box.size for box in boxes) for boxes in owned_boxes(spec, mesh, tuple(shape.values()))]
        assert elements_per_device(spec, shape, mesh) == max(held), (str(spec), str(mesh), shape)
        uneven += len(set(held)) > 1
    assert uneven > 100


def test_a_collective_of_a_dim_that_does_not_divide_has_the_larger_shard() -> None:
    mesh, shape = Mesh.of(a=2, b=4), {"x": 9, "y": 5}
    gathered = movement(parse("x/a y/b"), parse("x y/b"), [], shape, mesh)
    assert gathered == (Collective(kind="all-gather", axes=("a",), elements_per_device=9 * 2),)
    exchanged = movement(parse("x/b y"), parse("x y/b"), [], shape, mesh)
    assert exchanged == (Collective(kind="all-to-all", axes=("b",), elements_per_device=max(3 * 5, 9 * 2)),)


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        # Of a/b only b is gathered: a still shards a dim in the end, and is exchanged while shards are small.
        ("x/a/b y", "x y/a", [("all-gather", ("b",)), ("all-to-all", ("a",))]),
        ("x/a/b/c y", "x y/a", [("all-gather", ("b", "c")), ("all-to-all", ("a",))]),
        ("x/c/a/b y", "x/c y/a", [("all-gather", ("b",)), ("all-to-all", ("a",))]),
        ("x/a/b y", "x y", [("all-gather", ("a", "b"))]),
        # An axis that stays, but is minor to one that is removed, is gathered with it, and shards the dim again.
        ("x/a/b y", "x/b y", [("all-gather", ("a", "b")), ("slice", ("b",))]),
    ],
)
def test_only_axes_that_shard_nothing_in_the_end_are_gathered(before, after, kinds) -> None:
    found = reshard_steps(parse(before), parse(after), [], Mesh.of(a=2, b=2, c=2))
    assert [(step.kind, step.axes) for step in found] == kinds


def test_a_sum_waits_until_its_axis_can_scatter_it() -> None:
    """The axis is to shard a dim after another that is not there yet: an all-reduce first would send twice as much."""
    found = reshard_steps(parse("x y/b"), parse("x/b/a y"), ["a"], Mesh.of(a=2, b=2))
    assert [(step.kind, step.axes) for step in found] == [("all-to-all", ("b",)), ("reduce-scatter", ("a",))]
    # One that shards nothing in the end is all-reduced at once.
    found = reshard_steps(parse("x y/b"), parse("x/b y"), ["a"], Mesh.of(a=2, b=2))
    assert [(step.kind, step.axes) for step in found] == [("all-reduce", ("a",)), ("all-to-all", ("b",))]
