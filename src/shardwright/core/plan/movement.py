"""The steps that reshard a tensor from one spec to another: one small rule for activations, weights and gradients.

For each axis, by its placement of the tensor before and after:

| before | after | step |
|---|---|---|
| partial | replicate | all-reduce |
| partial | shard a dim | reduce-scatter |
| shard a dim | replicate | all-gather |
| shard a dim | shard another dim | all-to-all |
| replicate | shard a dim | slice: each device keeps its shard, and nothing is sent |

The steps can be executed in their order. An axis is added to a dim only after the axes that are more major there, and is
removed only after those that are more minor. Small tensors are sent before large ones: slices and reductions first,
gathers last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from shardwright.core.mesh.hops import Beside, Hops, SubGroup, hops_of, in_order, rewritten
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec

ReshardKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One step over ``axes``, major first, which removes them from the dim ``source`` and adds them to the dim ``target``.

    ``hops``: those in which it is done, over an entire slice; None: it is one collective.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    source: str | None = None
    target: str | None = None
    hops: Hops | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over ``axes``; ``elements_per_device`` are those of its operand or result, whichever is larger.

    Over an entire slice it may be a hop: over ``subgroup`` of its only axis, with hops of other chunks ``beside`` it, and
    ``rearranged`` after it into the order of the devices. ``compiled_as``: the kind that the compiler makes of it.
    """

    kind: str
    axes: tuple[str, ...]
    elements_per_device: int
    subgroup: SubGroup | None = None
    beside: tuple[Beside, ...] = ()
    rearranged: bool = False
    compiled_as: str | None = None


def reshard_steps(before: Spec, after: Spec, partial: Iterable[str], mesh: Mesh) -> tuple[ReshardStep, ...]:
    """The steps that reshard a tensor from one spec to another, in order. ``partial``: the axes over which it is partial.

    ``before`` and ``after`` have the same logical axes, in any order. Axes of size 1 need no step.

    >>> from shardwright.core.mesh.notation import parse
    >>> mesh = Mesh.of(fsdp=2, expert=4)
    >>> reshard_steps(parse("experts batch/fsdp groups/expert"), parse("experts/expert batch/fsdp groups"), [], mesh)
    (ReshardStep(kind='all-to-all', axes=('expert',), source='groups', target='experts', hops=None),)
    """
    return tuple(hopped(step, mesh) for step in _steps(before, after, tuple(partial), mesh.outline))


def hopped(step: ReshardStep, mesh: Mesh) -> ReshardStep:
    """The step, with the hops into which the mesh splits it."""
    return replace(step, hops=_hops(step.kind, step.axes, 0, mesh))


@lru_cache(maxsize=16384)
def _steps(before: Spec, after: Spec, partial: tuple[str, ...], outline: Mesh) -> tuple[ReshardStep, ...]:
    # All layers of a plan have the same steps, and so do those on a mesh with other sizes.
    assert set(before.logical_axes) == set(after.logical_axes), (str(before), str(after))
    return tuple(_StepSearch(before, after, partial, outline).found())


Held = tuple[tuple[str, tuple[str, ...]], ...]
"""The axes that shard each dim."""


@lru_cache(maxsize=16384)
def _sent(
    before: Spec, after: Spec, partial: tuple[str, ...], outline: Mesh
) -> tuple[tuple[ReshardStep, Held, Held], ...]:
    """The steps that send something, each with the axes of each dim before and after it."""
    held = {dim.logical_axis: list(dim.axes) for dim in before.dims}
    found: list[tuple[ReshardStep, Held, Held]] = []
    for step in _steps(before, after, partial, outline):
        earlier = _held(held)
        _apply(step, held)
        if step.kind != "slice":
            found.append((step, earlier, _held(held)))
    return tuple(found)


def _held(axes_of: Mapping[str, Sequence[str]]) -> Held:
    return tuple((name, tuple(axes)) for name, axes in axes_of.items())


def movement(
    before: Spec, after: Spec, partial: Iterable[str], shape: Mapping[str, int], mesh: Mesh
) -> tuple[Collective, ...]:
    """The collectives among these steps, each with its size.

    >>> from shardwright.core.mesh.notation import parse
    >>> mesh = Mesh.of(fsdp=2, expert=4)
    >>> before, after = parse("experts batch/fsdp groups/expert"), parse("experts/expert batch/fsdp groups")
    >>> movement(before, after, [], {"experts": 8, "batch": 4, "groups": 4}, mesh)
    (Collective(kind='all-to-all', axes=('expert',), elements_per_device=16, subgroup=None, beside=(), rearranged=False, compiled_as=None),)
    """
    return tuple(
        [
            collective
            for step, earlier, later in _sent(before, after, tuple(partial), mesh.outline)
            for collective in collectives(
                step.kind, step.axes, max(_elements(earlier, shape, mesh), _elements(later, shape, mesh)), mesh
            )
        ]
    )


def collectives(kind: ReshardKind, axes: tuple[str, ...], elements: int, mesh: Mesh) -> Iterator[Collective]:
    """One collective, or the hops into which the mesh splits it; ``elements`` of its operand or result, the larger."""
    hops = _hops(kind, axes, elements, mesh)
    if hops is None:
        sums = rewritten(kind, mesh.size(axes), mesh.num_devices, mesh.whole_slice)
        yield Collective(kind=kind, axes=axes, elements_per_device=elements, compiled_as="all-reduce" if sums else None)
        return
    for hop in in_order(kind, hops):
        yield Collective(
            kind=kind,
            axes=hop.axes,
            elements_per_device=hop.elements,
            subgroup=hop.subgroup,
            beside=hop.beside,
            rearranged=not hops.in_place and hop.is_last,
        )


def _hops(kind: ReshardKind, axes: tuple[str, ...], elements: int, mesh: Mesh) -> Hops | None:
    whole = mesh.whole_slice
    if whole is None or not rewritten(kind, mesh.size(axes), mesh.num_devices, whole):
        return None
    return hops_of(axes, mesh.shape, elements, whole)


def elements_per_device(spec: Spec, shape: Mapping[str, int], mesh: Mesh) -> int:
    """Elements of the largest shard of a tensor. A dim that its axes do not divide is rounded up."""
    return _elements([(dim.logical_axis, dim.axes) for dim in spec.dims], shape, mesh)


def _elements(held: Iterable[tuple[str, Sequence[str]]], shape: Mapping[str, int], mesh: Mesh) -> int:
    elements = 1
    for name, axes in held:
        elements *= ceil(shape[name] / mesh.size(axes)) if axes else shape[name]
    return elements


def _apply(step: ReshardStep, held: Mapping[str, list[str]]) -> None:
    """Change ``held``, the axes that shard each dim, as a step does."""
    for axis in step.axes:
        if step.source is not None:
            held[step.source].remove(axis)
        if step.target is not None:
            held[step.target].append(axis)


class _StepSearch:
    """The search for steps. ``held``: the axes that shard each dim now; ``wanted``: those in the end; both major first."""

    def __init__(self, before: Spec, after: Spec, partial: Iterable[str], mesh: Mesh) -> None:
        self.held = {d.logical_axis: list(mesh.larger_than_one(d.axes)) for d in before.dims}
        self.wanted = {d.logical_axis: list(mesh.larger_than_one(d.axes)) for d in after.dims}
        sharding = {axis for axes in self.held.values() for axis in axes}
        self.partial = [axis for axis in mesh.larger_than_one(mesh.in_mesh_order(partial)) if axis not in sharding]

    def found(self) -> Iterator[ReshardStep]:
        while (step := self._next()) is not None:
            yield step
            _apply(step, self.held)
            self.partial = [axis for axis in self.partial if axis not in step.axes]
        assert self.held == self.wanted, (self.held, self.wanted)

    def _next(self) -> ReshardStep | None:
        entering = {name: self._entering(name) for name in self.wanted}
        for name, axes in entering.items():
            if run := _leading(axes, lambda axis: self._dim_of(axis) is None and axis not in self.partial):
                return ReshardStep(kind="slice", axes=run, target=name)
        for name, axes in entering.items():
            if run := _leading(axes, lambda axis: axis in self.partial):
                return ReshardStep(kind="reduce-scatter", axes=run, target=name)
        wanted = {axis for axes in self.wanted.values() for axis in axes}
        if replicated := tuple(axis for axis in self.partial if axis not in wanted):
            return ReshardStep(kind="all-reduce", axes=replicated)
        for name, axes in entering.items():
            for source, held in self.held.items():
                run = _leading(axes, lambda axis, held=held: axis in held)
                # Only the most minor axes of a dim can be removed, and all that move are removed in one step.
                if run and source != name and tuple(held[len(held) - len(run) :]) == run:
                    return ReshardStep(kind="all-to-all", axes=run, source=source, target=name)
        leaving = {name: self._leaving(name) for name in self.held}
        for name, axes in leaving.items():
            minor = _leading(axes[::-1], lambda axis: axis not in wanted)[::-1]
            if minor:
                return ReshardStep(kind="all-gather", axes=minor, source=name)
        # Axes that change their order, or that other axes block: the dim is replicated over them for a moment.
        for name, axes in leaving.items():
            if axes:
                return ReshardStep(kind="all-gather", axes=tuple(axes), source=name)
        return None

    def _entering(self, name: str) -> list[str]:
        """The axes still to be added to the dim; none while there are axes on it that must be removed first."""
        return [] if self._leaving(name) else self.wanted[name][len(self.held[name]) :]

    def _leaving(self, name: str) -> list[str]:
        """The axes of the dim from the first one that is not in its wanted place."""
        held, wanted = self.held[name], self.wanted[name]
        same = 0
        while same < min(len(held), len(wanted)) and held[same] == wanted[same]:
            same += 1
        return held[same:]

    def _dim_of(self, axis: str) -> str | None:
        return next((name for name, axes in self.held.items() if axis in axes), None)


def _leading(axes: Sequence[str], wanted) -> tuple[str, ...]:
    """The longest run of first axes that are all wanted."""
    run = []
    for axis in axes:
        if not wanted(axis):
            break
        run.append(axis)
    return tuple(run)
