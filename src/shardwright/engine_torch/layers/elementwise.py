"""Operations on each element: sums, biases, factors and caps, and values side by side along their last dim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch


def added(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``x`` plus the sum of the others."""
    return x + reduce(add, others)


def with_bias(x: torch.Tensor, bias: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """``dims``: those of ``x`` that the bias has."""
    return x + bias.view([size if dim in dims else 1 for dim, size in enumerate(x.shape)]).to(x.dtype)


def capped(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Between ``-limit`` and ``limit``."""
    return limit * torch.tanh(x / limit)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """One after the other along the last dim. A part without heads is that of all heads."""
    if len(parts) == 1:
        return parts[0]
    shape = max((part.shape for part in parts), key=len)[:-1]
    whole = [part if part.dim() > len(shape) else part[..., None, :].expand(*shape, part.shape[-1]) for part in parts]
    return torch.cat(whole, dim=-1)
