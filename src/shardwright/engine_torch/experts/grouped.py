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
from shardwright.core.program.walk import ExpertGroup
from shardwright.engine_torch.io.layer_io import HowMany, LowPrecision, as_counted
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.layers.gate import gated
from shardwright.engine_torch.layers.product import NONE_AGREED
from shardwright.engine_torch.precision.coded import Coded
from shardwright.engine_torch.precision.operands import Amaxes, input_amaxes
from shardwright.engine_torch.precision.products import quantized_grouped_product

NOTHING: Mapping[str, LowPrecision] = MappingProxyType({})


class Matrices(NamedTuple):
    """The matrices of a rank's experts, as PyTorch stores them: outputs before inputs."""

    gate_EFM: torch.Tensor | Coded
    up_EFM: torch.Tensor | Coded
    down_EMF: torch.Tensor | Coded


def grouped_swiglu(
    rows_RM: torch.Tensor,
    matrices: Matrices,
    sizes_E: torch.Tensor,
    group: ExpertGroup,
    how_many: HowMany = as_counted,
    low: Mapping[str, LowPrecision] = NOTHING,
) -> torch.Tensor:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM. ``sizes_E``: the rows of each expert, R in all.
    ``group``: under which names; ``low``: how operands are quantized, by the names of weights."""
    gate, up, down = (low.get(step.weights[0].name) for step in group.products)
    amaxes = NONE_AGREED
    if gate is not None or up is not None:
        # Both weights have the same input.
        amaxes = input_amaxes(rows_RM.split(how_many(sizes_E, rows_RM.shape[0])), (gate, up))
    gate_RF = named(
        grouped_product(rows_RM, matrices.gate_EFM, sizes_E, how_many, gate, amaxes), group.gate.output.name
    )
    up_RF = named(grouped_product(rows_RM, matrices.up_EFM, sizes_E, how_many, up, amaxes), group.up.output.name)
    return grouped_product(gated(gate_RF, up_RF), matrices.down_EMF, sizes_E, how_many, down)


def grouped_product(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor | Coded,
    sizes_E: torch.Tensor,
    how_many: HowMany = as_counted,
    low: LowPrecision | None = None,
    amaxes: Amaxes = NONE_AGREED,
) -> torch.Tensor:
    """Each row times its expert's matrix, RO. ``low``: how operands are quantized; ``amaxes``: of the rows, where several weights multiply them.

    A GPU computes all of them in one kernel; a CPU computes an ordinary product for each expert
    (``core/plan/expert_kernels.py``).
    """
    # Rows of both operands have the same number of elements and the same dtype.
    if low is not None:
        rows = how_many(sizes_E, x_RI.shape[0])
        return quantized_grouped_product(x_RI, weight_EOI, rows, low, amaxes)
    assert not isinstance(weight_EOI, Coded)
    if has_grouped_mm(x_RI.shape[-1] * x_RI.element_size(), on_gpu=x_RI.is_cuda):
        ends_E = sizes_E.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=ends_E)
    by_expert = x_RI.split(how_many(sizes_E, x_RI.shape[0]))
    return torch.cat([functional.linear(x, weight) for x, weight in zip(by_expert, weight_EOI.unbind(), strict=True)])
