"""Records what a step does: each collective with its group and bytes, and the bytes that are held.

A dispatch mode gets every operation, also those of ``fully_shard``. The call stack shows which pass of the step an operation
belongs to, and which line called it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.fsdp_groups import FsdpGroup, component_of
from shardwright.core.plan.plan import Phase
from shardwright.engine_torch.dry_run.held import Held
from shardwright.engine_torch.io.host import TO_HOST
from shardwright.engine_torch.io.private import group_of
from shardwright.engine_torch.io.scopes import what_moves

KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "send": "permute",
}
"""By PyTorch's name of the operation. A receive does not count: the send counts, on the other rank."""

UNCOUNTED = ("recv_", "barrier")

OWN = Path(__file__).parents[1]
BELOW = frozenset({"private", "redistribute", "counting", "held", "dry_run", "scopes", "recomputation"})
"""Files of the engine that run collectives for others: they are not the source of one."""

LATE = frozenset({"_sum_late", "reduce_amaxes", "reduce_updates", "gather_updates", "sum_tied", "rest_as_codes"})
"""Functions whose collectives are after the last microbatch."""

HALVES = frozenset({"stage_backward_input", "stage_backward_weight", "end_backward"})
"""Functions that run a part of the backward pass without ``Tensor.backward``."""

AGAIN = frozenset({("checkpoint.py", "recompute_fn"), ("recomputation.py", "_run_again")})
"""Functions that compute a layer again, by their files."""

COMPONENTS = {"exchange": "moe", "moe": "moe", "ring": "attention", "loss": "logits"}
"""The component of the collectives that a file of the engine makes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCollective:
    """A collective on one rank. ``phase`` None: for the entire step, outside its passes."""

    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    dtypes: tuple[str, ...]
    component: str | None
    phase: Phase | None
    tensors: tuple[str, ...]
    source: str | None
    ragged: bool
    group_size: int


class Counting(TorchDispatchMode):
    """While it is active, it records ``counted``, each distinct collective and how often; ``held``, the bytes; and ``on_host``, those put on the host.

    ``named``: the component and the weights of a collective, by kind, axes and bytes (``of_weights``).
    """

    def __init__(
        self, mesh: Mesh, named: Mapping[tuple[str, tuple[str, ...], int], tuple[str, tuple[str, ...]]]
    ) -> None:
        super().__init__()
        self.counted: dict[CountedCollective, int] = {}
        self.held, self.on_host = Held(), Held()
        self._mesh, self._named = mesh, named
        self._axes: dict[str, tuple[str, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            # It is dispatched again, as operations on the local shards.
            return NotImplemented
        if func.namespace == "c10d":
            self._count(func._schema.name.split("::")[1], args)
        made = func(*args, **(kwargs or {}))
        (self.on_host if func is TO_HOST else self.held).add(made)
        return made

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in UNCOUNTED:
            return
        assert name in KINDS, name
        kind, group = KINDS[name], group_of(arguments)
        tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        sizes = [one.numel() * one.element_size() for one in tensors]
        size = sum(sizes) if kind == "all-reduce" else max(sizes)
        axes = self._axes_of(group)
        where = _Where.find(sys._getframe())
        moving = what_moves() or self._owner(where, kind, axes, size)
        one = CountedCollective(
            kind=kind,
            axes=axes,
            bytes_per_device=size,
            dtypes=tuple(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in tensors)),
            component=moving[0],
            phase=where.phase(kind),
            tensors=moving[1] if isinstance(moving[1], tuple) else (moving[1],),
            source=where.source,
            ragged=kind == "all-to-all" and any(isinstance(one, list | tuple) and one for one in arguments),
            group_size=group.size(),
        )
        self.counted[one] = self.counted.get(one, 0) + 1

    def _owner(self, where: _Where, kind: str, axes: tuple[str, ...], size: int) -> tuple[str | None, tuple[str, ...]]:
        if where.of_weights:
            return self._named.get((kind, axes, size), (None, ()))
        return (COMPONENTS.get(where.file or ""), ())

    def _axes_of(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        """The axes along which the ranks of a group differ, in mesh order."""
        if group.group_name not in self._axes:
            coordinates = [self._mesh.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            self._axes[group.group_name] = tuple(
                axis for axis in self._mesh.names if len({one[axis] for one in coordinates}) > 1
            )
        return self._axes[group.group_name]


def of_weights(
    groups: list[FsdpGroup], mesh: Mesh
) -> Mapping[tuple[str, tuple[str, ...], int], tuple[str, tuple[str, ...]]]:
    """The component and the weights of each collective of ``fully_shard`` and of late sums, by its kind, axes and bytes."""
    found: dict[tuple[str, tuple[str, ...], int], tuple[str, tuple[str, ...]]] = {}
    late: dict[tuple[tuple[str, ...], str], list[Any]] = {}

    def name(kind: str, axes: tuple[str, ...], size: int, ones: Any) -> None:
        found.setdefault((kind, axes, size), (component_of(ones, mesh), tuple(dict.fromkeys(o.weight for o in ones))))

    for group in groups:
        first, elements = group.weights[0], group.shard_elements(mesh)
        if group.axes:
            gathered = elements * mesh.size(group.axes)
            name("all-gather", group.axes, gathered * DTYPE_BYTES[first.gather_dtype], group.weights)
            name("reduce-scatter", group.axes, gathered * DTYPE_BYTES[first.reduce_dtype], group.weights)
            name("all-reduce", group.replicas, elements * DTYPE_BYTES[first.reduce_dtype], group.weights)
        for one in group.weights:
            if axes := group.other_replicas(one):
                late.setdefault((axes, one.reduce_dtype), []).append(one)
    for (axes, dtype), ones in late.items():
        name("all-reduce", axes, sum(one.shard_elements(mesh) for one in ones) * DTYPE_BYTES[dtype], ones)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """Where in the program a collective was called. ``file``: of the engine, without its suffix."""

    file: str | None
    source: str | None
    backward: bool
    again: bool
    sharded: bool
    late: bool

    @classmethod
    def find(cls, frame: FrameType) -> _Where:
        calls = [(Path(one.f_code.co_filename), one.f_code.co_name, one.f_lineno) for one in _outwards(frame)]
        own = [(path, line) for path, _, line in calls if OWN in path.parents and path.stem not in BELOW]
        inner = own[0][0] if own else None
        before = calls[: next((n for n, call in enumerate(calls) if call[0] == inner), 0)] if inner else calls
        names = {name for _, name, _ in calls}
        in_graph = bool(HALVES & names) or any(
            path.name == "_tensor.py" and name == "backward" for path, name, _ in calls
        )
        # The input half computes layers again, before it enters their graphs.
        half = "input_gradient" in names
        backward = in_graph or half or bool({"_send_back", "sum_gradient"} & names)
        return cls(
            file=own[0][0].stem if own else None,
            source=f"{own[0][0].relative_to(OWN.parent).as_posix()}:{own[0][1]}" if own else None,
            backward=backward,
            again=(backward and bool(AGAIN & {(path.name, name) for path, name, _ in calls}))
            or (half and not in_graph),
            sharded=any("_fully_shard" in path.parts for path, _, _ in before),
            late=bool(LATE & names),
        )

    @property
    def of_weights(self) -> bool:
        return self.sharded or self.late

    def phase(self, kind: str) -> Phase | None:
        if self.late or (self.sharded and kind == "all-reduce"):
            return "update"
        if self.sharded and self.backward:
            return "recompute" if kind == "all-gather" else "backward"
        if self.again:
            return "recompute"
        if self.backward:
            return "backward"
        inside = self.sharded or self.file not in (None, "step", "optimizer")
        return "forward" if inside else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
