"""A norm followed by a linear layer, or by a feed-forward layer of two or three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.recipe import Dim
from shardwright.engine_torch.modules.linear import DIM_NAMES, linear_parameters, require_mode
from shardwright.engine_torch.modules.norm import Normalization, norm_parameters, normalized
from shardwright.engine_torch.modules.parts.activations import activation_of
from shardwright.engine_torch.modules.parts.arguments import refuse
from shardwright.engine_torch.modules.parts.initial import InitMethod
from shardwright.engine_torch.modules.parts.signatures import as_in_transformer_engine
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from shardwright.engine_torch.modules.products import ProductModule

NORM = "layer_norm_"
"""What the names of a norm's parameters begin with."""


class LayerNormLinear(ProductModule):
    """A norm, then a linear layer: replicated, or column-parallel.

    >>> LayerNormLinear(4, 2, normalization="RMSNorm")(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    layer_norm_weight: torch.nn.Parameter
    weight: torch.nn.Parameter

    @as_in_transformer_engine("LayerNormLinear")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        parallel_mode: Mode | None = None,
        normalization: Normalization = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        **options: Any,
    ) -> None:
        require_mode(parallel_mode)
        if parallel_mode == "row":
            raise InputError(
                "LayerNormLinear: parallel_mode='row' gives a rank a part of the features, and a norm needs all of them. Use an "
                "RMSNorm or LayerNorm before a column-parallel layer."
            )
        self.in_features, self.out_features, self.use_bias, self.eps = in_features, out_features, bias, eps
        self.parallel_mode: Mode | None = parallel_mode
        self.normalization: Normalization = normalization
        self.zero_centered_gamma, self.return_layernorm_output = zero_centered_gamma, return_layernorm_output
        parameters = norm_parameters(NORM, in_features, normalization, zero_centered=zero_centered_gamma)
        parameters += linear_parameters("", in_features, out_features, parallel_mode, init_method, bias=bias)
        super().__init__(parameters, **options)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The output; with ``return_layernorm_output``, and what the norm gives, of the tokens of this rank."""
        del is_first_microbatch
        refuse(self.label, {"fp8_output": fp8_output, "fp8_grad": fp8_grad})
        x = normalized(self, inp, NORM, self.normalization, self.eps, zero_centered=self.zero_centered_gamma)
        y = self.product(x, ("weight", "bias" if self.use_bias else None), self.parallel_mode)
        return (y, x) if self.return_layernorm_output else y

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        return {"weight": (self.parallel_mode, DIM_NAMES)}


class LayerNormMLP(ProductModule):
    """A norm, then ``fc2(activation(fc1(x)))``; gated: ``fc2(activation(fc1_gate(x)) * fc1(x))``.

    ``set_parallel_mode``: fc1 is column-parallel and fc2 row-parallel; otherwise both are replicated. A gated layer has two
    weights, where Transformer Engine has one of both: a shard of that one would have other rows on another tp mesh.

    >>> LayerNormMLP(4, 8, activation="swiglu")(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """

    layer_norm_weight: torch.nn.Parameter
    fc1_weight: torch.nn.Parameter
    fc2_weight: torch.nn.Parameter

    @as_in_transformer_engine("LayerNormMLP")
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        set_parallel_mode: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        **options: Any,
    ) -> None:
        self.activate = activation_of(activation, activation_params)
        self.hidden_size, self.ffn_hidden_size, self.use_bias, self.eps = hidden_size, ffn_hidden_size, bias, eps
        self.normalization: Normalization = normalization
        self.zero_centered_gamma, self.activation = zero_centered_gamma, activation
        self.return_layernorm_output = return_layernorm_output
        self.modes: tuple[Mode | None, Mode | None] = ("column", "row") if set_parallel_mode else (None, None)
        into, out = self.modes
        parameters = norm_parameters(NORM, hidden_size, normalization, zero_centered=zero_centered_gamma)
        for prefix in self.inner():
            parameters += linear_parameters(prefix, hidden_size, ffn_hidden_size, into, init_method, bias=bias)
        last = output_layer_init_method or init_method
        parameters += linear_parameters("fc2_", ffn_hidden_size, hidden_size, out, last, bias=bias)
        super().__init__(parameters, **options)

    def inner(self) -> tuple[str, ...]:
        """What the names of the first layers' parameters begin with; that of the gate last."""
        return ("fc1_", "fc1_gate_") if self.activate.gated else ("fc1_",)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As ``LayerNormLinear.forward``."""
        del is_first_microbatch
        normed = normalized(self, inp, NORM, self.normalization, self.eps, zero_centered=self.zero_centered_gamma)
        into, out = self.modes
        x = self.entered(normed, "fc1_weight", into)
        hidden = [self.product_of_entered(x, self._names(prefix), into) for prefix in self.inner()]
        y = self.product(self.activate(*reversed(hidden)), self._names("fc2_"), out)
        return (y, normed) if self.return_layernorm_output else y

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        into, out = self.modes
        before: Mapping[Dim, str] = {"inputs": "hidden_size", "outputs": "ffn_hidden_size"}
        after: Mapping[Dim, str] = {"inputs": "ffn_hidden_size", "outputs": "hidden_size"}
        return {**{f"{prefix}weight": (into, before) for prefix in self.inner()}, "fc2_weight": (out, after)}

    def _names(self, prefix: str) -> tuple[str, str | None]:
        return f"{prefix}weight", f"{prefix}bias" if self.use_bias else None
