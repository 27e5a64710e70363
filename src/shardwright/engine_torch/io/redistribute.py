"""The core's steps, carried out on a rank's part of an array: one collective each, along any dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwright.core.plan.movement import Step
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.private import all_gather, reduce_scatter


def redistribute(array: torch.Tensor, way: Iterable[Step], names: Sequence[str], ranks: Ranks) -> torch.Tensor:
    """A rank's part of an array, taken through the steps; ``names`` are the logical axes of its dims.

    Nothing is differentiated here: the way back is the core's too.
    """

    def dim(name: str | None) -> int:
        assert name is not None, way
        return names.index(name)

    for step in way:
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


def summed(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum over all ranks, on each of them."""
    if peers.group is None:
        return array
    result = array.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=peers.group)
    return result


def gathered(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """The parts of all ranks along ``dim``, major first."""
    if peers.group is None:
        return array
    if array.dtype == torch.bool:
        # A byte each: no backend sends single bits.
        return gathered(array.view(torch.uint8), dim, peers).view(torch.bool)
    part = array.movedim(dim, 0).contiguous()
    out = part.new_empty((peers.size * part.shape[0], *part.shape[1:]))
    all_gather(out, part, peers.group)
    return _reordered(out, peers.order, peers).movedim(0, dim)


def scattered(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """Of the sum over all ranks this one's part of ``dim``."""
    if peers.group is None:
        return array
    whole = _reordered(array.movedim(dim, 0), peers.place, peers).contiguous()
    out = whole.new_empty((whole.shape[0] // peers.size, *whole.shape[1:]))
    reduce_scatter(out, whole, peers.group)
    return out.movedim(0, dim)


def exchanged(array: torch.Tensor, source: int, target: int, peers: Peers) -> torch.Tensor:
    """Cut along ``target`` in place of ``source``, which is whole afterwards."""
    if peers.group is None:
        return array
    parts = array.unflatten(target, (peers.size, array.shape[target] // peers.size)).movedim(target, 0)
    sent = parts[list(peers.place)] if not peers.in_order else parts
    sent = sent.contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=peers.group)
    came = came[list(peers.order)] if not peers.in_order else came
    return came.movedim(0, source).flatten(source, source + 1)


def own_shard(array: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """This rank's part of ``dim``; nothing is sent."""
    size = array.shape[dim] // peers.size
    return array.narrow(dim, peers.index * size, size)


def in_its_place(part: torch.Tensor, dim: int, peers: Peers) -> torch.Tensor:
    """The whole dim with this rank's part where it belongs, and zeros elsewhere."""
    size = part.shape[dim]
    shape = [*part.shape[:dim], size * peers.size, *part.shape[dim + 1 :]]
    whole = part.new_zeros(shape)
    whole.narrow(dim, peers.index * size, size).copy_(part)
    return whole


def _reordered(array: torch.Tensor, order: Sequence[int], peers: Peers) -> torch.Tensor:
    """The parts along dim 0 in another order."""
    if peers.in_order:
        return array
    return array.unflatten(0, (peers.size, array.shape[0] // peers.size))[list(order)].flatten(0, 1)
