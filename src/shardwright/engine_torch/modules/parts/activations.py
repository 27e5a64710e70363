"""Activations of feed-forward layers, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from shardwright.core.findings.errors import InputError

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """``function(first)``; ``gated``: times the second one. ``limit``: the first is at most that, and the second within it; ``offset`` is added to
    the second."""

    function: Function
    gated: bool = False
    limit: float | None = None
    offset: float = 0.0

    def __call__(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        if self.limit is not None:
            first = first.clamp(max=self.limit)
            second = second.clamp(-self.limit, self.limit) if second is not None else None
        activated = self.function(first)
        if second is None:
            return activated
        return activated * (second + self.offset if self.offset else second)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _scaled_silu(alpha: float) -> Function:
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(alpha * x)

    return silu


QUICK = 1.702
CLAMPED: Mapping[str, float] = {"limit": 7.0, "alpha": QUICK, "glu_linear_offset": 1.0}
"""The parameters of ``clamped_swiglu`` with their defaults."""

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(function=_gelu),
    "relu": Activation(function=functional.relu),
    "silu": Activation(function=functional.silu),
    "srelu": Activation(function=_squared_relu),
    "qgelu": Activation(function=_scaled_silu(QUICK)),
    "glu": Activation(function=torch.sigmoid, gated=True),
    "geglu": Activation(function=_gelu, gated=True),
    "reglu": Activation(function=functional.relu, gated=True),
    "sreglu": Activation(function=_squared_relu, gated=True),
    "qgeglu": Activation(function=_scaled_silu(QUICK), gated=True),
    "swiglu": Activation(function=functional.silu, gated=True),
    "clamped_swiglu": Activation(function=_scaled_silu(QUICK), gated=True, limit=CLAMPED["limit"], offset=1.0),
}


def activation_of(name: str, parameters: Mapping[str, float] | None) -> Activation:
    """Raises InputError for a name or parameters that there are not."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(f"activation is {name!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    if not parameters:
        return ACTIVATIONS[name]
    unknown = [parameter for parameter in parameters if name != "clamped_swiglu" or parameter not in CLAMPED]
    if unknown:
        raise InputError(
            f"activation_params has {', '.join(map(repr, unknown))} for activation {name!r}; only clamped_swiglu has parameters: "
            f"{', '.join(CLAMPED)}."
        )
    of = {**CLAMPED, **parameters}
    return replace(
        ACTIVATIONS[name],
        function=_scaled_silu(of["alpha"]),
        limit=of["limit"],
        offset=of["glu_linear_offset"],
    )
