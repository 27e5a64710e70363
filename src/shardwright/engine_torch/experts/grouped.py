"""The experts' grouped products: rows sorted by expert, each multiplied with the matrices of its own expert only.

R rows, sorted by expert; M embed, F hidden units; E experts of this rank; I and O the input and output widths of
a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.plan.expert_kernels import has_grouped_mm
from shardwright.engine_torch.io.layer_io import HowMany, LowPrecision, as_counted
from shardwright.engine_torch.layers.product import weight_product

NOTHING: Mapping[str, LowPrecision] = MappingProxyType({})


class Matrices(NamedTuple):
    """The matrices of a rank's experts, as PyTorch stores them: outputs before inputs."""

    gate_EFM: torch.Tensor
    up_EFM: torch.Tensor
    down_EMF: torch.Tensor


def grouped_swiglu(
    rows_RM: torch.Tensor,
    matrices: Matrices,
    sizes_E: torch.Tensor,
    how_many: HowMany = as_counted,
    low: Mapping[str, LowPrecision] = NOTHING,
) -> torch.Tensor:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM. ``sizes_E``: the rows of each expert, R in all.
    ``low``: how operands are quantized, by ``moe.gate``, ``moe.up`` and ``moe.down``."""

    def product(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        return grouped_product(x, weight, sizes_E, how_many, low.get(f"moe.{name}"))

    gate_RF = product(rows_RM, matrices.gate_EFM, "gate")
    hidden_RF = functional.silu(gate_RF) * product(rows_RM, matrices.up_EFM, "up")
    return product(hidden_RF, matrices.down_EMF, "down")


def grouped_product(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    sizes_E: torch.Tensor,
    how_many: HowMany = as_counted,
    low: LowPrecision | None = None,
) -> torch.Tensor:
    """Each row times its expert's matrix, RO. Of quantized operands, each expert's rows are one of their own, as its matrix is.

    A GPU computes all of them in one kernel; a CPU computes an ordinary product for each expert
    (``core/plan/expert_kernels.py``).
    """
    # Rows of both operands have the same number of elements and the same dtype.
    if low is None and has_grouped_mm(x_RI.shape[-1] * x_RI.element_size(), on_gpu=x_RI.is_cuda):
        ends_E = sizes_E.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=ends_E)
    by_expert = x_RI.split(how_many(sizes_E, x_RI.shape[0]))
    return torch.cat(
        [weight_product(x, weight, low=low) for x, weight in zip(by_expert, weight_EOI.unbind(), strict=True)]
    )
