"""What crosses the links when a tensor changes owner: one small rule for activations, weights and gradients.

For each axis, by what it does to the tensor before and after:

| before | after | collective |
|---|---|---|
| partial | cuts nothing | all-reduce |
| partial | cuts a dim | reduce-scatter |
| cuts a dim | cuts nothing | all-gather |
| cuts a dim | cuts another dim | all-to-all |
| cuts nothing | cuts a dim | none: each device keeps its part |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from shardwright.core.mesh import Mesh
from shardwright.core.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over ``axes``; ``elements_per_device`` of its operand or result, whichever is larger."""

    kind: str
    axes: tuple[str, ...]
    elements_per_device: int


def elements_per_device(spec: Spec, shape: Mapping[str, int], mesh: Mesh) -> int:
    """Elements of the largest part of a tensor that one device holds; a dim that does not divide is rounded up."""
    elements = 1
    for dim in spec.dims:
        elements *= ceil(shape[dim.logical_axis] / mesh.size(dim.axes))
    return elements


def movement(
    before: Spec, after: Spec, partial: Iterable[str], shape: Mapping[str, int], mesh: Mesh
) -> tuple[Collective, ...]:
    """The collectives that bring a tensor from one spec to another, reductions first, gathers last.

    ``before`` and ``after`` have the same logical axes. Axes of size 1 move nothing.

    >>> from shardwright.core.notation import parse
    >>> mesh = Mesh.of(fsdp=2, expert=4)
    >>> before, after = parse("experts batch/fsdp groups/expert"), parse("experts/expert batch/fsdp groups")
    >>> movement(before, after, [], {"experts": 8, "batch": 4, "groups": 4}, mesh)
    (Collective(kind='all-to-all', axes=('expert',), elements_per_device=16),)
    """
    name_before = {axis: dim.logical_axis for dim in before.dims for axis in dim.axes}
    name_after = {axis: dim.logical_axis for dim in after.dims for axis in dim.axes}
    summed = set(partial) - set(name_before)
    kinds: dict[str, list[str]] = {"reduce-scatter": [], "all-reduce": [], "all-to-all": [], "all-gather": []}
    for axis in mesh.larger_than_one(mesh.names):
        source, target = name_before.get(axis), name_after.get(axis)
        if axis in summed:
            kinds["reduce-scatter" if target else "all-reduce"].append(axis)
        elif source is not None and source != target:
            kinds["all-to-all" if target else "all-gather"].append(axis)
    collectives = []
    current = {dim.logical_axis: set(dim.axes) for dim in before.dims}
    # An axis that only begins to cut takes its part before anything is sent.
    for axis, name in name_after.items():
        if axis not in name_before and axis not in summed:
            current[name].add(axis)
    for kind, axes in kinds.items():
        if not axes:
            continue
        size_before = _elements(current, before, shape, mesh)
        for axis in axes:
            if axis in name_before:
                current[name_before[axis]].discard(axis)
            if axis in name_after:
                current[name_after[axis]].add(axis)
        size = max(size_before, _elements(current, before, shape, mesh))
        collectives.append(Collective(kind=kind, axes=tuple(axes), elements_per_device=size))
    return tuple(collectives)


def _elements(cuts: Mapping[str, set[str]], like: Spec, shape: Mapping[str, int], mesh: Mesh) -> int:
    return elements_per_device(Spec.build(like.logical_axes, cuts), shape, mesh)
