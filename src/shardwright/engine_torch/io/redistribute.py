"""The core's steps as PyTorch collectives: one for each step, along any dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwright.core.plan.movement import ReshardStep
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.private import all_gather, reduce_scatter
from shardwright.engine_torch.io.recomputation import one_operation


def redistribute(array: torch.Tensor, steps: Iterable[ReshardStep], names: Sequence[str], ranks: Ranks) -> torch.Tensor:
    """A local shard after the steps of a resharding; ``names`` are the logical axes of its dims.

    Autograd does not differentiate it: the core gives the steps of the backward pass too.
    """

    def dim(name: str | None) -> int:
        assert name is not None, steps
        return names.index(name)

    for step in steps:
        peers = ranks.peers(step.axes)
        match step.kind:
            case "all-reduce":
                array = summed(array, peers)
            case "reduce-scatter":
                array = scattered(array, dim(step.target), peers)
            case "all-gather":
                array = gathered(array, dim(step.source), peers)
            case "all-to-all":
                array = exchanged(array, dim(step.source), dim(step.target), peers)
            case "slice":
                array = own_shard(array, dim(step.target), peers)
    return array


@one_operation
def summed(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum over all ranks, on each of them."""
    if peers.group is None:
        return array
    result = array.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=peers.group)
    return result


@one_operation
def gathered(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """The shards of all ranks, concatenated along ``dim``, major first."""
    if peers.group is None:
        return array
    if array.dtype == torch.bool:
        # One byte per element: no backend sends bits.
        return gathered(array.view(torch.uint8), dim, peers).view(torch.bool)
    shard = array.movedim(dim, 0).contiguous()
    out = shard.new_empty((peers.size * shard.shape[0], *shard.shape[1:]))
    all_gather(out, shard, peers.group)
    # Every product that reads it would copy it, and keep its copy for the backward pass.
    return _reordered(out, peers.order, peers).movedim(0, dim).contiguous()


@one_operation
def scattered(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """This rank's shard, along ``dim``, of the sum over all ranks."""
    if peers.group is None:
        return array
    full = _reordered(array.movedim(dim, 0), peers.place, peers).contiguous()
    out = full.new_empty((full.shape[0] // peers.size, *full.shape[1:]))
    reduce_scatter(out, full, peers.group)
    return out.movedim(0, dim)


@one_operation
def exchanged(array: torch.Tensor, source: int, target: int, peers: Peers) -> torch.Tensor:
    """The array sharded along ``target`` instead of ``source``, by an all-to-all."""
    if peers.group is None:
        return array
    shards = array.unflatten(target, (peers.size, array.shape[target] // peers.size)).movedim(target, 0)
    sent = shards[list(peers.place)] if not peers.in_order else shards
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=peers.group)
    received = received[list(peers.order)] if not peers.in_order else received
    return received.movedim(0, source).flatten(source, source + 1)


def own_shard(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """This rank's shard of ``dim``; nothing is sent."""
    size = array.shape[dim] // peers.size
    return array.narrow(dim, peers.index * size, size)


def zero_padded(shard: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """The full dim with this rank's shard at its offset, and zeros elsewhere."""
    size = shard.shape[dim]
    shape = [*shard.shape[:dim], size * peers.size, *shard.shape[dim + 1 :]]
    full = shard.new_zeros(shape)
    full.narrow(dim, peers.index * size, size).copy_(shard)
    return full


def _reordered(array: torch.Tensor, order: Sequence[int], peers: Peers) -> torch.Tensor:
    """The shards along dim 0 in another order."""
    if peers.in_order:
        return array
    return array.unflatten(0, (peers.size, array.shape[0] // peers.size))[list(order)].flatten(0, 1)
