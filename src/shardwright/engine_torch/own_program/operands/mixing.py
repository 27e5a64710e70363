"""Operations on activations that are sharded between two modules, as a user's own module writes them.

The outputs of a column-parallel layer are a DTensor, so that a view may name the number of all heads, and a sum over hidden units
is the sum over all of them. What DTensor does not do:

| operation | what happens |
|---|---|
| a sharded tensor with a plain one (a mask, angles of rotary positions) | the plain one, which all ranks have, is a replicated DTensor |
| ``scaled_dot_product_attention`` of heads that are sharded | each rank attends with its own heads |
| the attention of ``nn.MultiheadAttention`` | as above (``fused.py``) |
| a concatenation with a plain tensor without elements (an empty cache of keys) | that one is left out, as PyTorch does |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.engine_torch.io.private import mapped_tensors
from shardwright.engine_torch.own_program.operands.fused import FUSED, attend_by_heads

ATTENTION = functional.scaled_dot_product_attention
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


class MixedOperands(TorchFunctionMode):
    """While it is entered, operations take sharded and plain tensors together."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        meshes = [tensor.device_mesh for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
        if not meshes:
            return func(*args, **kwargs)
        if func in CONCATENATIONS:
            args = (_without_empty(args[0]), *args[1:]) if args else args
        mesh = meshes[0]
        operands, options = (mapped_tensors(lambda tensor: replicated(tensor, mesh), part) for part in (args, kwargs))
        return INSTEAD.get(func, func)(*operands, **options)


def tensors_in(operands: object) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments, also those in lists and dicts."""
    if isinstance(operands, torch.Tensor):
        yield operands
    elif isinstance(operands, tuple | list):
        for operand in operands:
            yield from tensors_in(operand)
    elif isinstance(operands, dict):
        for operand in operands.values():
            yield from tensors_in(operand)


def replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor, the same on all ranks of the mesh, as a DTensor whose gradient is summed over them where it is partial."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def without_sums(tensor: DTensor) -> DTensor:
    """The tensor with its sums over ranks complete."""
    placements = [Replicate() if isinstance(placement, Partial) else placement for placement in tensor.placements]
    return tensor if placements == list(tensor.placements) else tensor.redistribute(placements=placements)


def is_replicated(tensor: DTensor) -> bool:
    return all(isinstance(placement, Replicate) for placement in tensor.placements)


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> DTensor:
    """``scaled_dot_product_attention``, with each rank's rows of a batch and heads. What shards positions or widths is gathered first."""
    mesh: DeviceMesh = query.device_mesh
    placements = [_kept(query, key, value, axis) for axis in range(mesh.ndim)]
    local_query, local_key, local_value = (_local(operand, placements) for operand in (query, key, value))
    if isinstance(attn_mask, DTensor):
        missing = query.ndim - attn_mask.ndim
        of_mask = [
            Shard(placement.dim - missing)
            if isinstance(placement, Shard)
            and placement.dim >= missing
            and attn_mask.shape[placement.dim - missing] > 1
            else Replicate()
            for placement in placements
        ]
        attn_mask = _local(attn_mask, of_mask)
    attended = ATTENTION(local_query, local_key, local_value, attn_mask, *rest, **options)
    return DTensor.from_local(attended, mesh, placements, run_check=False)


def _without_empty(operands: Any) -> Any:
    """The tensors to concatenate without those of shape (0,), which PyTorch takes for none whatever the shapes of the others are."""
    return [operand for operand in operands if isinstance(operand, DTensor) or operand.shape != (0,)]


def _kept(query: DTensor, key: DTensor, value: DTensor, axis: int) -> Placement:
    """How an axis of the mesh shards the operands of attention: a dim before positions and widths, in equal shards, the same of all
    three, or none."""
    dims = {
        placement.dim if isinstance(placement, Shard) else None
        for placement in (operand.placements[axis] for operand in (query, key, value))
    }
    if len(dims) > 1 or None in dims:
        return Replicate()
    dim = dims.pop()
    assert dim is not None
    num_shards = query.device_mesh.size(axis)
    equal = all(operand.shape[dim] % num_shards == 0 for operand in (query, key, value))
    return Shard(dim) if 0 <= dim < query.ndim - 2 and equal else Replicate()


def _local(operand: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    return operand.redistribute(placements=placements).to_local()


INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {ATTENTION: _attend, FUSED: attend_by_heads}
"""What runs in place of a function of PyTorch."""
