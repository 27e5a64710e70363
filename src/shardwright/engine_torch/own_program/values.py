"""What every rank of a module that is not ours must have alike before it is laid out: its weights and its buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError


def require_same_values(module: nn.Module, device: torch.device) -> None:
    """Refuse weights and buffers of which a rank has other values than rank 0; every rank says the same.

    What is on ``meta`` has none. Digests travel, 8 bytes a tensor. Raises InputError.
    """
    tensors = _tensors(module)
    for what, one in tensors.items():
        if isinstance(one, DTensor):
            raise InputError(f"{what} is a DTensor: leave it whole, as each rank keeps all of it.")
    names = torch.tensor([_number("\n".join(tensors).encode())], dtype=torch.int64, device=device)
    others = _others(names)[0]
    if others:
        raise InputError(
            f"the ranks do not have the same weights and buffers: {_said(others)} has others than rank 0. Build the same "
            f"module on each."
        )
    digests = torch.tensor([_digest(one) for one in tensors.values()], dtype=torch.int64, device=device)
    for what, others in zip(tensors, _others(digests), strict=True):
        if others:
            raise InputError(
                f"{what} is not the same on all ranks: that of {_said(others)} is not that of rank 0. Make both alike before, "
                f"by one seed on every rank, or by torch.distributed.broadcast from rank 0."
            )


def _tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Each weight and buffer by what to call it."""
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


def _said(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" (and of {len(ranks) - 1} more)" if len(ranks) > 1 else "")


def _digest(one: torch.Tensor) -> int:
    """Of shape, dtype and bytes; of what has no values, of its shape and dtype."""
    header = f"{tuple(one.shape)} {one.dtype}".encode()
    if one.is_meta or not one.numel():
        return _number(header)
    whole = (
        (one.detach().to_dense() if one.is_sparse else one.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
    )
    return _number(header + b"\n", whole.numpy().tobytes())


def _number(*parts: bytes) -> int:
    """63 bits of a digest, as an int64 holds them."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "big") >> 1
