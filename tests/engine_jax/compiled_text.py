"""The collectives of a compiled step on CPU, read out of its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.core.mesh import Mesh

KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
OPERATION = re.compile(rf"= (?P<results>.*?) (?P<kind>{KINDS})(?:-start)?\((?P<rest>.*)$", re.MULTILINE)
LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
)


class Result(NamedTuple):
    """One tensor that a collective leaves on a device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """The sizes of its dims in no order, those of 1 left out: what stays of a shape when dims are turned."""
        return sorted(size for size in self.shape if size > 1)


class Collective(NamedTuple):
    """``axes``: the mesh axes along which the devices of a group differ; none for a permutation."""

    kind: str
    axes: tuple[str, ...]
    results: tuple[Result, ...]


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective of a compiled program's text, one inside a loop once."""
    found = []
    for match in OPERATION.finditer(text):
        results = tuple(
            Result(dtype, tuple(_numbers(shape))) for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match["results"])
        )
        permutes = match["kind"] == "collective-permute"
        axes = () if permutes else axes_of(replica_groups(match["rest"], mesh.num_devices), mesh)
        found.append(Collective(match["kind"], axes, results))
    return found


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """The groups of devices of one collective, in any of the three forms that XLA writes.

    >>> replica_groups("replica_groups={{0,2},{1,3}}", 4), replica_groups("replica_groups={}", 2)
    ([[0, 2], [1, 3]], [[0, 1]])
    >>> replica_groups("replica_groups=[2,4]<=[4,2]T(1,0)", 8)
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    >>> replica_groups("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 8)
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    if match := LISTED.search(text):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])] or [list(range(devices))]
    if match := COUNTED.search(text):
        return _counted(match[2], match[3]).reshape(_numbers(match[1])).tolist()
    match = NAMED.search(text)
    assert match, text
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    order = _counted(match[2], match[3]) if match[2] else np.arange(prod(sizes.values()))
    along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[4])]
    others = [dim for dim in range(len(sizes)) if dim not in along]
    grid = order.reshape(list(sizes.values())).transpose(others + along)
    return grid.reshape(-1, prod(list(sizes.values())[dim] for dim in along)).tolist()


def axes_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes whose groups these are, those of size 1 left out."""
    wanted = {tuple(sorted(group)) for group in groups}
    for axes in _subsets(mesh.larger_than_one(mesh.names)):
        if wanted == {mesh.group(device, axes) for device in range(mesh.num_devices)}:
            return axes
    raise AssertionError(f"{groups} are the groups of no axes of {mesh}")


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for number in range(len(names) + 1):
        yield from combinations(names, number)


def _counted(sizes: str, turned: str | None) -> np.ndarray:
    """0, 1, 2, ... laid out over ``sizes``, the dims then turned."""
    grid = np.arange(prod(_numbers(sizes))).reshape(_numbers(sizes))
    return grid.transpose(_numbers(turned) if turned else range(grid.ndim)).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
