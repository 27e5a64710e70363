"""Each row through the feed-forward layer of its own expert, and no other.

R rows, sorted by expert; M embed, F hidden units; E experts of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.engine_torch.layer_io import HowMany, as_counted

ALIGNED_BYTES = 16
"""What PyTorch's grouped product wants a row of either operand to be a multiple of."""


class Matrices(NamedTuple):
    """Of a rank's experts, as PyTorch stores them: outputs before inputs."""

    gate_EFM: torch.Tensor
    up_EFM: torch.Tensor
    down_EMF: torch.Tensor


def grouped_swiglu(
    rows_RM: torch.Tensor, matrices: Matrices, sizes_E: torch.Tensor, how_many: HowMany = as_counted
) -> torch.Tensor:
    """What experts make of their rows, RM; ``sizes_E``: how many rows each has, R in all."""
    gate_RF = grouped_product(rows_RM, matrices.gate_EFM, sizes_E, how_many)
    hidden_RF = functional.silu(gate_RF) * grouped_product(rows_RM, matrices.up_EFM, sizes_E, how_many)
    return grouped_product(hidden_RF, matrices.down_EMF, sizes_E, how_many)


def grouped_product(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor, sizes_E: torch.Tensor, how_many: HowMany = as_counted
) -> torch.Tensor:
    """Each row times its expert's matrix, RO.

    A GPU does all in one kernel; a CPU takes the experts in turn, each an ordinary product.
    """
    if x_RI.is_cuda and _aligned(x_RI) and _aligned(weight_EOI):
        ends_E = sizes_E.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=ends_E)
    parts = x_RI.split(how_many(sizes_E, x_RI.shape[0]))
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


def _aligned(array: torch.Tensor) -> bool:
    return array.shape[-1] * array.element_size() % ALIGNED_BYTES == 0
