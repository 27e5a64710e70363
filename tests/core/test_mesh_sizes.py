"""Sizes of the mesh axes: every request gives a mesh with its number of devices, or an error whose fix works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from random import Random

import pytest

from shardwright import Request, model_table
from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.findings.errors import FindingsError
from shardwright.core.layout.reading import read_layout
from shardwright.core.resolution.mesh_sizes import resolve_mesh
from shardwright.files import parse_yaml

TABLE = model_table("llama3-test")


def request(declared: Mapping[str, object], requested: dict[str, int], devices: int | None) -> Request:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in declared.items())
    roles = "".join(f"  {axis}: data\n" for axis in declared)
    layout = read_layout(parse_yaml(f"name: mine\nmesh: {{{sizes}}}\nroles:\n{roles}", "mine.yaml"))
    return Request(layout=layout, table=TABLE, mesh_sizes=requested, devices=devices, batch=8, length=64)


def fixes(given: Request) -> dict[str, str]:
    """Each error and its fix."""
    with pytest.raises(FindingsError) as caught:
        resolve_mesh(given)
    return {finding.found: finding.fix for finding in caught.value.findings}


@pytest.mark.parametrize(
    ("declared", "requested", "devices", "fix"),
    [
        # Size 1 removes the error, but 1 x 2 are not 8 devices. The size that fills them adds no other error.
        ({"a": 2, "b": 2}, {"a": 0}, 8, {"size 0": "--mesh a=4"}),
        ({"a": 2, "b": 2}, {"a": -1}, None, {"size -1": "--mesh a=1"}),
        # No multiple of 3 is 4.
        ({"a": 3, "b": 2}, {"b": 0}, 4, {"size 0": ""}),
        # Both are reported, and no fix repeats the other's size.
        ({"a": 2, "b": 2}, {"a": 0, "b": -2}, 8, {"size 0": "--mesh a=8,b=1", "size -2": "--mesh a=1,b=8"}),
        # The other sizes that were given stay: the text takes the place of the option.
        ({"a": 2, "b": 2}, {"a": 1, "b": 3}, 4, {"a 1 x b 3 = 3": "--mesh a=1,b=4"}),
        ({"a": 2, "b": 2}, {}, 6, {"a 2 x b 2 = 4": "--mesh a=3"}),
    ],
)
def test_a_fix_removes_its_error_and_adds_no_other(declared, requested, devices, fix) -> None:
    assert fixes(request(declared, requested, devices)) == fix


@pytest.mark.parametrize(("known", "left"), [(1, 8), (3, 2), (8, 1), (16, 1)])
def test_without_devices_auto_takes_what_fits_on_the_models_own_and_at_least_one(known: int, left: int) -> None:
    assert TABLE.natural_mesh == {"fsdp": 8}
    mesh, _ = resolve_mesh(request({"a": "auto", "b": known}, {}, None))
    assert (mesh.size("a"), mesh.size("b")) == (left, known)


def typed(given: Request, fix: str) -> Request:
    option, value = fix.split()
    if option == "--devices":
        return replace(given, devices=int(value))
    return replace(given, mesh_sizes=mesh_sizes(value))


def faults(given: Request) -> list[tuple[str, str]]:
    """The code and place of each error."""
    try:
        resolve_mesh(given)
    except FindingsError as error:
        return [(finding.code, finding.where) for finding in error.findings]
    return []


def test_random_sizes_give_a_mesh_with_their_devices_or_fixes_that_work() -> None:
    random = Random(0)
    meshes = fixed = several = 0
    for _ in range(1500):
        axes = ("a", "b", "c")[: random.randint(1, 3)]
        declared = {axis: random.choice(("auto", 1, 2, 3, 4)) for axis in axes}
        requested = {axis: random.choice((-1, 0, 1, 2, 4, 6)) for axis in (*axes, "bb") if random.random() < 0.25}
        given = request(declared, requested, random.choice((None, 1, 4, 6, 8, 12)))
        before = faults(given)
        if not before:
            mesh, _ = resolve_mesh(given)
            sizes = {**declared, **requested}
            assert all(sizes[axis] in ("auto", mesh.size(axis)) for axis in axes)
            assert given.devices in (None, prod(mesh.size(axis) for axis in axes))
            meshes += 1
            continue
        with pytest.raises(FindingsError) as caught:
            resolve_mesh(given)
        for finding in caught.value.findings:
            if finding.fix:
                after = faults(typed(given, finding.fix))
                assert (finding.code, finding.where) not in after, (declared, requested, given.devices, finding)
                assert set(after) < set(before)
                fixed += 1
        several += len(before) > 1
    assert min(meshes, fixed, several) > 100, (meshes, fixed, several)
