"""Checks that all ranks have the same weights and buffers of a user's own module, before it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError


def require_same_values(module: nn.Module, device: torch.device) -> None:
    """Raise InputError, with the same message on every rank, if a rank's weights or buffers differ from those of rank 0.

    Tensors on ``meta`` have no values to compare. Ranks exchange digests, 8 bytes per tensor.
    """
    tensors = _tensors(module)
    for what, one in tensors.items():
        if isinstance(one, DTensor):
            raise InputError(f"{what} is a DTensor: give each rank the full tensor, since each rank keeps all of it.")
    names = torch.tensor([_number("\n".join(tensors).encode())], dtype=torch.int64, device=device)
    others = _others(names)[0]
    if others:
        raise InputError(
            f"the ranks do not have the same weights and buffers: those of {_label(others)} are not those of rank 0. Build the "
            f"same module on each."
        )
    digests = torch.tensor([_digest(one) for one in tensors.values()], dtype=torch.int64, device=device)
    for what, others in zip(tensors, _others(digests), strict=True):
        if others:
            raise InputError(
                f"{what} is not the same on all ranks: that of {_label(others)} is not that of rank 0. Make them equal before, "
                f"with the same seed on every rank, or with torch.distributed.broadcast from rank 0."
            )


def _tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Each weight and buffer by its name in a message."""
    return {
        **{f"weight '{name}'": one for name, one in module.named_parameters()},
        **{f"buffer '{name}'": one for name, one in module.named_buffers()},
    }


def _others(numbers: torch.Tensor) -> Sequence[Sequence[int]]:
    """For each number, the ranks whose number is not that of rank 0."""
    if not len(numbers):
        return ()
    least, most = numbers.clone(), numbers.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if torch.equal(least, most):
        return [()] * len(numbers)
    found = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(found, numbers)
    by_rank = torch.stack(found).tolist()
    return [
        [rank for rank, own in enumerate(by_rank) if own[number] != by_rank[0][number]]
        for number in range(len(numbers))
    ]


def _label(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" (and of {len(ranks) - 1} more)" if len(ranks) > 1 else "")


def _digest(one: torch.Tensor) -> int:
    """A digest of shape, dtype and bytes; without values, of shape and dtype."""
    header = f"{tuple(one.shape)} {one.dtype}".encode()
    if one.is_meta or not one.numel():
        return _number(header)
    flat = (one.detach().to_dense() if one.is_sparse else one.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
    return _number(header + b"\n", flat.numpy().tobytes())


def _number(*parts: bytes) -> int:
    """63 bits of a digest, which fit in an int64."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "big") >> 1
