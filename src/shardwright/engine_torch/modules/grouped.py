"""Linear layers of which each has tokens of its own, as the experts of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.recipe import Dim
from shardwright.engine_torch.modules.linear import DIM_NAMES, linear_parameters, require_mode
from shardwright.engine_torch.modules.parts.arguments import refuse
from shardwright.engine_torch.modules.parts.initial import InitMethod
from shardwright.engine_torch.modules.parts.signatures import as_in_transformer_engine
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode, exchanged, in_autocast
from shardwright.engine_torch.modules.products import ProductModule


class GroupedLinear(ProductModule):
    """``num_gemms`` linear layers with parameters ``weight0``, ``bias0``, ``weight1``, ...: tokens are sorted by layer.

    ``forward(x, m_splits)``: the first ``m_splits[0]`` tokens of x ``[tokens, in_features]`` are for layer 0, and so on.

    >>> GroupedLinear(2, 4, 3)(torch.ones(5, 4), [5, 0]).shape
    torch.Size([5, 3])
    """

    @as_in_transformer_engine("GroupedLinear")
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: Mode | None = None,
        init_method: InitMethod | None = None,
        **options: Any,
    ) -> None:
        require_mode(parallel_mode)
        if num_gemms < 1:
            raise InputError(f"GroupedLinear: num_gemms is {num_gemms}; it must be 1 or more.")
        if options.get("sequence_parallel"):
            raise InputError(
                "GroupedLinear: with sequence_parallel a rank would have a part of each layer's tokens. Gather the tokens before "
                "they are sorted, and leave it out."
            )
        self.num_gemms, self.in_features, self.out_features, self.use_bias = num_gemms, in_features, out_features, bias
        self.parallel_mode: Mode | None = parallel_mode
        parameters = []
        for number in range(num_gemms):
            parameters += [
                replace(one, name=f"{one.name}{number}")
                for one in linear_parameters("", in_features, out_features, parallel_mode, init_method, bias=bias)
            ]
        super().__init__(parameters, **options)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int],
        is_first_microbatch: bool | None = None,
        out: None = None,
        dgrad_out: None = None,
    ) -> torch.Tensor:
        del is_first_microbatch
        refuse(self.label, {"out": out, "dgrad_out": dgrad_out})
        x = inp
        splits = [int(number) for number in m_splits]
        if x.dim() != 2 or len(splits) != self.num_gemms or sum(splits) != len(x) or any(one < 0 for one in splits):
            raise InputError(
                f"{self.label}: its input is {tuple(x.shape)}, and m_splits has {len(splits)} numbers with the sum {sum(splits)}. "
                f"Give tokens [tokens, features], and {self.num_gemms} numbers whose sum is that of the tokens."
            )
        peers, mode = self.peers, self.parallel_mode
        self.require_width(x, "weight0", mode, peers)
        x = in_autocast(x)
        x = exchanged(x, "copied", peers) if mode == "column" else x
        made = [
            self.multiplied(tokens, f"weight{number}", mode, sorted_tokens=True)
            for number, tokens in enumerate(x.split(splits))
        ]
        y = exchanged(torch.cat(made), "summed", peers) if mode == "row" else torch.cat(made)
        if not self.use_bias:
            return y
        biases = [self.weight_in_use(f"bias{number}", x.dtype) for number in range(self.num_gemms)]
        return torch.cat([part + bias for part, bias in zip(y.split(splits), biases, strict=True)])

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        return {f"weight{number}": (self.parallel_mode, DIM_NAMES) for number in range(self.num_gemms)}
