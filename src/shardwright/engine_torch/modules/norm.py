"""Norms over the last dim, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.nn import functional

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.modules.parallel import ParallelModule
from shardwright.engine_torch.modules.parts.arguments import require_floats
from shardwright.engine_torch.modules.parts.initial import ONES, ZEROS, Parameter
from shardwright.engine_torch.modules.parts.signatures import as_in_transformer_engine

Normalization = Literal["LayerNorm", "RMSNorm"]


class _Norm(ParallelModule):
    """``kind``: what is computed, and which parameters it has."""

    kind: ClassVar[Normalization]
    weight: torch.nn.Parameter

    # Of both norms.
    @as_in_transformer_engine("RMSNorm")
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        *,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **options: Any,
    ) -> None:
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None or (normalized_shape is not None and hidden_size is not None):
            raise InputError(f"{self.kind} needs normalized_shape, or its older name hidden_size, and not both.")
        self.hidden_size = one_dim(shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        parameters = norm_parameters("", self.hidden_size, self.kind, zero_centered=zero_centered_gamma)
        super().__init__(parameters, sequence_parallel=bool(sequence_parallel), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(self, x, "", self.kind, self.eps, zero_centered=self.zero_centered_gamma)


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight``; with ``zero_centered_gamma``, times ``1 + weight``, which begins at 0.

    ``sequence_parallel``: a rank of tp has its own shard of the tokens.

    >>> RMSNorm(4)(torch.full((1, 4), 2.0)).detach()
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """

    kind = "RMSNorm"


class LayerNorm(_Norm):
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias``; ``zero_centered_gamma`` and the rest as in ``RMSNorm``.

    >>> LayerNorm(2)(torch.tensor([[1.0, 3.0]])).round().tolist()
    [[-1.0, 1.0]]
    """

    kind = "LayerNorm"
    bias: torch.nn.Parameter


def norm_parameters(prefix: str, size: int, kind: Normalization, *, zero_centered: bool) -> list[Parameter]:
    """The parameters of a norm, which tp replicates. Raises InputError for another kind."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise InputError(f"normalization is {kind!r}; it must be 'LayerNorm' or 'RMSNorm'.")
    initial = ZEROS if zero_centered else ONES
    found = [Parameter(name=f"{prefix}weight", shape=(size,), tp_dim=None, initial=initial)]
    if kind == "LayerNorm":
        found.append(Parameter(name=f"{prefix}bias", shape=(size,), tp_dim=None, initial=ZEROS))
    return found


def normalized(
    module: ParallelModule, x: torch.Tensor, prefix: str, kind: Normalization, eps: float, *, zero_centered: bool
) -> torch.Tensor:
    """``x`` normalized with the parameters of a module whose names begin with ``prefix``; in the dtype of ``x``."""
    require_floats(x, module.label)
    wide = computed("norm", x.dtype)
    weight = module.weight_in_use(f"{prefix}weight", wide)
    if x.shape[-1] != len(weight):
        raise InputError(f"{module.label}: its input is {tuple(x.shape)}; it must be [..., {len(weight)}].")
    if zero_centered:
        weight = weight + 1
    if kind == "RMSNorm":
        return rms_norm(x, weight, eps)
    bias = module.weight_in_use(f"{prefix}bias", wide)
    return functional.layer_norm(x.to(wide), weight.shape, weight, bias, eps).to(kept("norm", x.dtype))


def one_dim(shape: int | Sequence[int]) -> int:
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if len(sizes) != 1:
        raise InputError(f"normalized_shape is {tuple(sizes)}; only the last dim is normalized. Give one number.")
    return sizes[0]
