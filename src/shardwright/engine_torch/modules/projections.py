"""Several linear layers of one input, after a norm or not: queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.core.recipes.recipe import Dim
from shardwright.engine_torch.modules.linear import linear_parameters
from shardwright.engine_torch.modules.norm import Normalization, norm_parameters, normalized
from shardwright.engine_torch.modules.normed import NORM
from shardwright.engine_torch.modules.parts.initial import InitMethod
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from shardwright.engine_torch.modules.products import ProductModule


class Projections(ProductModule):
    """``parts``: by name, how many features each gives; ``query`` has ``query_weight`` and ``query_bias``. Each is sharded by itself, so a
    part of a rank is the same rows on any tp mesh. ``normalization`` None: there is no norm. ``fused_groups``: in a checkpoint of Transformer
    Engine they are one weight, interleaved in so many groups; 1: one after the other, None: they are apart there too.

    >>> query, key = Projections(4, {"query": 8, "key": 2})(torch.ones(3, 4))[0]
    >>> query.shape, key.shape
    (torch.Size([3, 8]), torch.Size([3, 2]))
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        parallel_mode: Mode | None = None,
        normalization: Normalization | None = None,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        fused_groups: int | None = None,
        **options: Any,
    ) -> None:
        self.fused_groups = fused_groups
        self.in_features, self.parts, self.use_bias, self.eps = in_features, dict(parts), bias, eps
        self.parallel_mode: Mode | None = parallel_mode
        self.normalization: Normalization | None = normalization
        self.zero_centered_gamma = zero_centered_gamma
        parameters = []
        if normalization is not None:
            parameters += norm_parameters(NORM, in_features, normalization, zero_centered=zero_centered_gamma)
        for name, num in parts.items():
            parameters += linear_parameters(f"{name}_", in_features, num, parallel_mode, init_method, bias=bias)
        super().__init__(parameters, **options)

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What each part gives, and the input after the norm."""
        if self.normalization is not None:
            x = normalized(self, x, NORM, self.normalization, self.eps, zero_centered=self.zero_centered_gamma)
        first = next(iter(self.parts))
        tokens = self.entered(x, f"{first}_weight", self.parallel_mode)
        products = []
        for name in self.parts:
            names = f"{name}_weight", f"{name}_bias" if self.use_bias else None
            products.append(self.product_of_entered(tokens, names, self.parallel_mode))
        return products, x

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        return {
            f"{name}_weight": (self.parallel_mode, {"inputs": "hidden_size", "outputs": f"{name} features"})
            for name in self.parts
        }
