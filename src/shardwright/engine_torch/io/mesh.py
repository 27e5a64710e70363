"""The ranks of a run over the axes of its mesh: one DeviceMesh, and one process group for each set of axes that needs one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import resharding, weight_reshardings
from shardwright.engine_torch.io.private import flattened

Axes = tuple[str, ...]


def count_devices() -> int:
    """The GPUs of this machine; 1 on a host without any."""
    return max(1, torch.cuda.device_count())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks of a process group over ``axes``, major first, from the view of one of them.

    ``index``: of this rank. ``group`` None: it is alone. ``order``: for each rank, major first, its rank in the
    process group, which counts in mesh order.
    """

    axes: Axes
    size: int
    index: int
    group: dist.ProcessGroup | None
    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(self.size))

    @property
    def place(self) -> tuple[int, ...]:
        """The inverse of ``order``: for each rank of the process group, its index over ``axes``."""
        return tuple(self.order.index(number) for number in range(self.size))


class Ranks:
    """This rank's coordinates in a mesh, and its process groups. All ranks make all groups at once, in the same order."""

    def __init__(self, mesh: Mesh, wanted: Iterable[Axes], device: torch.device) -> None:
        self.mesh, self.device, self.rank = mesh, device, dist.get_rank()
        assert dist.get_world_size() == mesh.num_devices, (dist.get_world_size(), str(mesh))
        self.device_mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(axis.size for axis in mesh.axes), mesh_dim_names=mesh.names
        )
        here = mesh.coordinates(self.rank)
        self._here: Mapping[str, int] = here
        self._meshes: dict[Axes, DeviceMesh] = {}
        for axes in dict.fromkeys(self._group_axes(axes) for axes in wanted):
            if len(axes) == 1:
                self._meshes[axes] = self.device_mesh[axes[0]]
            elif axes:
                self._meshes[axes] = flattened(self.device_mesh, axes)
        self._peers: dict[Axes, Peers] = {}

    def peers(self, axes: Iterable[str]) -> Peers:
        """The group over some axes, in the order given; those of size 1 change nothing."""
        axes = self.mesh.larger_than_one(axes)
        if axes not in self._peers:
            self._peers[axes] = self._new_peers(axes)
        return self._peers[axes]

    def beside(self, axes: Collection[str]) -> Ranks:
        """The ranks that differ from this one in none of these axes, as ranks of a mesh without them; groups are the same ones."""
        found = copy(self)
        found.mesh = Mesh(tuple(axis for axis in self.mesh.axes if axis.name not in axes))
        found.rank = found.mesh.device(self._here)
        found._here = found.mesh.coordinates(found.rank)
        found._peers = {}
        return found

    def place_over(self, axes: Iterable[str]) -> tuple[int, int]:
        """The index of this rank over some axes, major first, and how many ranks there are along them."""
        index, size = 0, 1
        for axis in axes:
            index, size = index * self.mesh.size(axis) + self._here[axis], size * self.mesh.size(axis)
        return index, size

    def submesh(self, axes: Iterable[str]) -> DeviceMesh:
        """The axes as a mesh of one dim; they are one of the sets in ``wanted``."""
        return self._meshes[self._group_axes(axes)]

    def _group_axes(self, axes: Iterable[str]) -> Axes:
        return self.mesh.larger_than_one(self.mesh.in_mesh_order(axes))

    def _new_peers(self, axes: Axes) -> Peers:
        group_axes = self._group_axes(axes)
        index, size = self.place_over(axes)
        group = self._meshes[group_axes].get_group() if group_axes else None
        return Peers(axes=axes, size=size, index=index, group=group, order=self.mesh.numbers(axes))


def communicating_axes(plan: Plan) -> Iterator[Axes]:
    """Every set of axes that needs a process group in a run of a plan, in a fixed order."""
    mesh = plan.mesh
    if plan.pipeline is not None:
        yield plan.pipeline.axes
        # Most stages have equal rows, of other layers.
        unlike = {tuple((w.name, w.num) for w in own.request.table.weights): own for own in plan.stage_plans}
        for own in unlike.values():
            yield from communicating_axes(own)
    yield from ((axis,) for axis in mesh.names)
    yield from (mesh.names, plan.dp, plan.cp, plan.loss_axes)
    for one in plan.collectives:
        yield one.axes
    for move in plan.request.table.moves:
        if move.kind not in ("dispatch", "combine"):
            moved = resharding(plan.request, plan.by_name, move)
            yield from (step.axes for step in (*moved.forward(mesh), *moved.backward(mesh)))
    for tensor in plan.tensors:
        yield tensor.in_use.axes
        yield from (dim.axes for dim in tensor.in_use.dims)
        if tensor.kind == "weight":
            yield from (tensor.shard_group, tensor.replica_group, tuple(tensor.gradient))
            yield tuple(axis for axis, kind in tensor.gradient.items() if kind == "all-reduce")
            for weight in weight_reshardings(plan.request, mesh, tensor).values():
                yield tuple(axis for axis in weight.at_rest.axes if axis not in weight.gathered.axes)


def ranks_of(plan: Plan, device: torch.device) -> Ranks:
    """This rank in a run of a plan. The process group of all ranks exists already."""
    return Ranks(plan.mesh, communicating_axes(plan), device)
