"""A linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.recipe import Dim
from shardwright.engine_torch.modules.parts.arguments import refuse
from shardwright.engine_torch.modules.parts.initial import ZEROS, InitMethod, Parameter, weight_initial
from shardwright.engine_torch.modules.parts.signatures import as_in_transformer_engine
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from shardwright.engine_torch.modules.products import ProductModule

DIM_NAMES: Mapping[Dim, str] = {"inputs": "in_features", "outputs": "out_features"}


class Linear(ProductModule):
    """``x @ weight.T + bias``. The arguments are those of Transformer Engine's ``Linear``, and ``recipe``.

    | ``parallel_mode`` | weight on tp | bias | input | output |
    |---|---|---|---|---|
    | ``None`` | Replicate | Replicate | all features | all features |
    | ``column`` | Shard(0) | Shard(0) | all features | those of this rank |
    | ``row`` | Shard(1) | Replicate | those of this rank | all features |

    ``sequence_parallel``: where a rank has all features, it has its own shard of dim 0, of the tokens.

    >>> layer = Linear(4, 2, recipe="mxfp8")
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @as_in_transformer_engine("Linear")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        *,
        bias: bool = True,
        parallel_mode: Mode | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        amax_group: dist.ProcessGroup | None = None,
        recipe: object = None,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        require_mode(parallel_mode)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode: Mode | None = parallel_mode
        super().__init__(
            linear_parameters("", in_features, out_features, parallel_mode, init_method, bias=bias),
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            tp_mesh=tp_mesh,
            weight_mesh=weight_mesh,
            amax_group=amax_group,
            recipe=recipe,
            params_dtype=params_dtype,
            device=device,
            name=name,
            **others,
        )
        if not bias:
            self.register_parameter("bias", None)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor:
        del is_first_microbatch
        refuse(self.label, {"fp8_output": fp8_output, "fp8_grad": fp8_grad})
        return self.product(inp, ("weight", "bias" if self.use_bias else None), self.parallel_mode)

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        return {"weight": (self.parallel_mode, DIM_NAMES)}


def require_mode(mode: object) -> None:
    if mode not in (None, "column", "row"):
        raise InputError(f"parallel_mode is {mode!r}; it must be 'column', 'row' or None.")


def linear_parameters(
    prefix: str, inputs: int, outputs: int, mode: Mode | None, init_method: InitMethod | None, *, bias: bool
) -> list[Parameter]:
    """The weight of a linear layer, and its bias."""
    dim = {"column": 0, "row": 1, None: None}[mode]
    found = [
        Parameter(name=f"{prefix}weight", shape=(outputs, inputs), tp_dim=dim, initial=weight_initial(init_method))
    ]
    if bias:
        by = 0 if mode == "column" else None
        found.append(Parameter(name=f"{prefix}bias", shape=(outputs,), tp_dim=by, initial=ZEROS))
    return found
