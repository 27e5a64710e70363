"""What tensor parallelism sends: each exchange is one autograd function, with the exchange of its backward pass.

| exchange | forward | backward |
|---|---|---|
| ``copied`` | nothing | all-reduce |
| ``gathered`` | all-gather along dim 0 | reduce-scatter along dim 0 |
| ``summed`` | all-reduce | nothing |
| ``scattered`` | reduce-scatter along dim 0 | all-gather along dim 0 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io import redistribute
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.private import flattened as as_one_axis
from shardwright.engine_torch.own_program.shards import require_in_order

Exchange = Literal["copied", "gathered", "summed", "scattered"]
Mode = Literal["column", "row"]
Pass = Callable[[torch.Tensor, Peers], torch.Tensor]


def _as_it_is(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    del peers
    return array.view_as(array)


def _gathered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    return redistribute.gathered(array, 0, peers)


def _scattered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    return redistribute.scattered(array, 0, peers)


EXCHANGES: Mapping[Exchange, tuple[Pass, Pass]] = {
    "copied": (_as_it_is, redistribute.summed),
    "gathered": (_gathered, _scattered),
    "summed": (redistribute.summed, _as_it_is),
    "scattered": (_scattered, _gathered),
}


def exchanged(array: torch.Tensor, exchange: Exchange, peers: Peers) -> torch.Tensor:
    """A local activation after an exchange over ``peers``."""
    if peers.group is None:
        return array
    return _Exchanged.apply(array, exchange, peers)  # pyright: ignore[reportReturnType]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, exchange: Exchange, peers: Peers) -> torch.Tensor:
        ctx.exchange, ctx.peers = exchange, peers
        return EXCHANGES[exchange][0](array, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return EXCHANGES[ctx.exchange][1](cotangents[0], ctx.peers), None, None


def in_autocast(x: torch.Tensor) -> torch.Tensor:
    """Tokens in the dtype of ``torch.autocast``, where it is on: that of the products, which it does not see into."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def entered(x: torch.Tensor, mode: Mode | None, *, sequence_parallel: bool, peers: Peers) -> torch.Tensor:
    """The input of a linear layer, as its local weight needs it."""
    if mode != "column":
        return x
    return exchanged(x, "gathered" if sequence_parallel else "copied", peers)


def left(y: torch.Tensor, mode: Mode | None, *, sequence_parallel: bool, peers: Peers) -> torch.Tensor:
    """The output of a linear layer, made of what its local weight gives; the bias is added afterwards."""
    if mode != "row":
        return y
    return exchanged(y, "scattered" if sequence_parallel else "summed", peers)


def in_use(parameter: torch.Tensor, dtype: torch.dtype, peers: Peers, *, partial: bool) -> torch.Tensor:
    """The local tensor of a parameter, cast to ``dtype``, whose gradient arrives with the parameter's placement.

    ``partial``: tp replicates the parameter, and each of its ranks uses it with tokens of its own. The gradient is then the sum
    over tp, in float32; otherwise a rank's gradient is complete already, or that of its own shard.
    """
    local = parameter.to_local(grad_placements=parameter.placements) if isinstance(parameter, DTensor) else parameter
    if partial and peers.group is not None:
        local = _Used.apply(local, peers)
        assert isinstance(local, torch.Tensor)
    return local.to(dtype)


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return local.view_as(local)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = cotangents[0]
        return redistribute.summed(gradient.float(), ctx.peers).to(gradient.dtype), None


def peers_of(mesh: DeviceMesh) -> Peers:
    """The ranks of a mesh of one dim."""
    size = mesh.size()
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tp"
    return Peers(
        axes=(name,),
        size=size,
        index=mesh.get_local_rank(),
        group=mesh.get_group() if size > 1 else None,
        order=tuple(range(size)),
    )


def peers_in(group: dist.ProcessGroup) -> Peers:
    """The ranks of a process group."""
    size = dist.get_world_size(group)
    return Peers(
        axes=("group",),
        size=size,
        index=dist.get_rank(group),
        group=group if size > 1 else None,
        order=tuple(range(size)),
    )


def require_one_dim(mesh: object, what: str) -> DeviceMesh:
    """Raises InputError for what is not a DeviceMesh of one dim, or whose ranks do not ascend."""
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"{what} is a {type(mesh).__name__}; it must be a DeviceMesh of one dim, as mesh['tp'].")
    if mesh.ndim != 1:
        sizes = " x ".join(map(str, mesh.shape))
        names = mesh.mesh_dim_names
        of = f"the dims {', '.join(names)} of sizes {sizes}" if names else f"{mesh.ndim} dims of sizes {sizes}"
        pick = f"one of them, as mesh['{names[-1]}']" if names else "a mesh of one dim"
        raise InputError(f"{what} has {of}; it must have one dim. Give {pick}.")
    require_in_order(mesh, what)
    return mesh


def flattened(mesh: object, label: str) -> DeviceMesh:
    """The ranks of a mesh as one dim. Raises InputError for what is not a DeviceMesh, or whose ranks do not ascend."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 and mesh.mesh_dim_names:
        mesh = as_one_axis(mesh, mesh.mesh_dim_names)
    return require_one_dim(mesh, label)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def require_equal(mesh: DeviceMesh, mine: Mapping[str, str], label: str) -> None:
    """Raises InputError, on every rank of a mesh, where they differ in one of these."""
    for group in _groups_of(mesh):
        of_all = _gathered_objects(mine, group)
        ranks = dist.get_process_group_ranks(group)
        for what, first in of_all[0].items():
            other = next((rank for rank, each in enumerate(of_all) if each[what] != first), None)
            if other is not None:
                raise InputError(
                    f"{label}: the ranks differ in its {what}: {first} on rank {ranks[0]}, {of_all[other][what]} on "
                    f"rank {ranks[other]}. Give all ranks the same."
                )


def first_seed(mesh: DeviceMesh, seed: int, label: str, changed: Callable[[], str | None] | None = None) -> int:
    """The seed of a mesh's first rank; each rank may have drawn one of its own.

    ``changed``: names a parameter whose values are neither of the seed nor of a checkpoint. Raises InputError, on every rank, where seeds
    differ and there is one: it would be parts of other tensors.
    """
    for group in _groups_of(mesh):
        seeds = _gathered_objects(seed, group)
        if len(set(seeds)) > 1 and changed is not None:
            ranks = dist.get_process_group_ranks(group)
            for rank, name in zip(ranks, _gathered_objects(changed(), group), strict=True):
                if name is not None:
                    raise InputError(
                        f"{label}: the ranks drew its values with other seeds, and '{name}' has changed on rank {rank} since. Call "
                        f"torch.manual_seed with one number on all ranks before the module is constructed, or change it after set_device_mesh."
                    )
        seed = seeds[0]
    return seed


def _groups_of(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if mesh.size(dim) > 1 and dist.get_backend(group) != "fake":
            yield group


def _gathered_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, mine, group=group)
    return of_all


def mesh_of(group: dist.ProcessGroup, tp_size: int, device: torch.device, label: str) -> DeviceMesh:
    num = dist.get_world_size(group)
    if tp_size not in (1, num):
        raise InputError(
            f"{label}: tp_size={tp_size}, and tp_group has {num} ranks. Give the group of {tp_size} ranks."
        )
    kind = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
    return DeviceMesh.from_group(group, device.type if device.type != "meta" else kind, mesh_dim_names=("tp",))


def require_member(group: object, label: str) -> None:
    """Raises InputError for an ``amax_group`` that this rank is not in."""
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise InputError(
            f"{label}: amax_group is no process group that rank {dist.get_rank()} is in. Give each rank the group of the ranks with which "
            f"it shares tokens."
        )


def require_within(tp: Sequence[int], ranks: Sequence[int] | None, what: str) -> None:
    lacking = [rank for rank in tp if ranks is not None and rank not in ranks]
    if lacking:
        raise InputError(
            f"{what} has the ranks {sorted(ranks or ())}, and tp_mesh {sorted(tp)}: it must have all of these too. {lacking} are "
            f"missing."
        )


def lies_on(parameter: DTensor, mesh: DeviceMesh, placement: Placement) -> bool:
    return ranks_of(parameter.device_mesh) == ranks_of(mesh) and parameter.placements == (placement,)


def mesh_text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return "the mesh " + " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))
