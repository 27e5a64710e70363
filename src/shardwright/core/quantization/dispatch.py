"""Tokens that are sent to their experts as codes and scales (``dispatch_quantized``), as DeepSeek-V3 trains (arXiv:2412.19437, section
3.3.3: the activation before the experts' up-projections and its counterpart in the backward pass are sent in FP8, what is combined in
bfloat16).

| what is sent | as |
|---|---|
| a token to each of its experts | codes and scales of the recipe's input |
| the experts' outputs, back to the token | the dtype of the computation |
| the cotangent of an output to its expert | codes and scales of the recipe's output gradient, where each is of one token |
| the cotangents of a token, back to it | the dtype of the computation |

Experts compute with the values of the codes, under every layout: also where no token is sent. A scale is of one token's own row, which no
layout moves, and a power of two. So the values are exact in the dtype of the computation, and products that quantize them in the same
blocks have the same values again. Only the weight gradient, whose blocks are of several tokens, quantizes a second time.

A weight that stays in high precision is multiplied with tokens as they are: where one of those that read the tokens does, all of them
are sent as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.names import NO_NAMES, TensorNames
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.quantization.reductions import layers_on_device
from shardwright.core.recipes.formats import E2M1, E8M0, bits_of
from shardwright.core.recipes.recipe import Quantizer, Recipe
from shardwright.core.resolution.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRows:
    """How what is sent to experts is quantized; None: it is not. ``tokens``: in the forward pass and in the recomputation.
    ``cotangents``: in the backward pass. ``names``: of the model's tensors."""

    tokens: Quantizer | None = None
    cotangents: Quantizer | None = None
    names: TensorNames = NO_NAMES

    def in_layer(self, quantized: Collection[str]) -> SentRows:
        """The same in a layer in which these weights are quantized."""
        return replace(
            self,
            tokens=self.tokens if {*self.names.reading_weights} <= {*quantized} else None,
            cotangents=self.cotangents if {*self.names.output_weights} <= {*quantized} else None,
        )


AS_THEY_ARE = SentRows()


def sent_rows(recipe: Recipe | None, names: TensorNames) -> SentRows:
    """What a recipe says of the rows that are sent to experts. ``names``: of the model's tensors."""
    if recipe is None or not recipe.dispatch_quantized:
        return AS_THEY_ARE
    tokens = recipe.quantizers.get(("output", "input"))
    cotangents = recipe.quantizers.get(("input_gradient", "output_gradient"))
    return SentRows(
        names=names,
        tokens=None if tokens is None or unlike_a_row(tokens) else tokens,
        cotangents=None if cotangents is None or unlike_a_row(cotangents) else cotangents,
    )


def unlike_a_row(quantizer: Quantizer) -> str:
    """Why the codes of a row are not a function of that row alone, or their values not exact; empty where they are.

    >>> from shardwright.core.recipes.presets import preset
    >>> [unlike_a_row(preset(name).quantizers["output", "input"]) for name in ("mxfp8", "fp8-block", "fp8-row")]
    ['', '', '']
    >>> unlike_a_row(preset("fp8-current").quantizers["output", "input"])
    'a scale is of several tokens'
    >>> unlike_a_row(preset("fp8-block", use_f32_scales=True).quantizers["output", "input"])
    'scales are no powers of two'
    """
    if quantizer.block.other != 1 or quantizer.scale.of_tensor:
        return "a scale is of several tokens"
    if quantizer.scale.rule == "exact":
        return "scales are no powers of two"
    if quantizer.amax == "delayed" or quantizer.rounding == "stochastic" or quantizer.hadamard is not None:
        return "codes are not of the token alone"
    return ""


class RowArray(NamedTuple):
    """Codes or scales of rows. ``row_bytes``: of one row."""

    dtype: str
    row_bytes: int


def arrays_of_rows(quantizer: Quantizer, width: int) -> tuple[RowArray, RowArray]:
    """The codes and the scales of rows of ``width`` elements, as JAX sends them: scales in E8M0 as bytes.

    >>> from shardwright.core.recipes.presets import preset
    >>> [(one.dtype, one.row_bytes) for one in arrays_of_rows(preset("fp8-block").quantizers["output", "input"], 7168)]
    [('float8_e4m3fn', 7168), ('float32', 224)]
    """
    codes = "uint8" if quantizer.dtype == E2M1 else quantizer.dtype
    scale = quantizer.scale.dtype
    num = 1 if quantizer.block.contracted is None else ceil(width / quantizer.block.contracted)
    return (
        RowArray(dtype=codes, row_bytes=ceil(width * bits_of(quantizer.dtype) / 8)),
        RowArray(dtype="uint8" if scale == E8M0 else scale, row_bytes=num * bits_of(scale) // 8),
    )


def sent_as_codes(
    request: Request, mesh: Mesh, quantized: Sequence[QuantizedWeight], name: str, phase: str, width: int
) -> tuple[int, tuple[RowArray, ...]]:
    """In how many layers of a device the rows of an activation are sent as codes in a phase, and what is sent then. Codes and
    scales are sent one after the other, or the bytes of both in one collective. ``width``: elements of a row."""
    names, backward = request.table.names, phase == "backward"
    sent = sent_rows(request.precision, names)
    quantizer = sent.cotangents if backward else sent.tokens
    if quantizer is None or name not in ((names.returned,) if backward else (names.dispatched, names.tokens)):
        return 0, ()
    layers = coded_layers(request, mesh, quantized, names.output_weights if backward else names.reading_weights)
    arrays = arrays_of_rows(quantizer, width)
    if request.properties.sends_scales_with_codes:
        arrays = (RowArray(dtype="uint8", row_bytes=sum(one.row_bytes for one in arrays)),)
    return layers, arrays if layers else ()


def coded_layers(request: Request, mesh: Mesh, quantized: Sequence[QuantizedWeight], names: Collection[str]) -> int:
    """In how many layers of a device all of these weights of experts are quantized."""
    layers: dict[str, dict[str, int]] = {}
    for one in quantized:
        for name in names if one.stack is not None else ():
            if one.name == f"{one.stack}.{name}":
                layers.setdefault(str(one.stack), {})[name] = layers_on_device(request, mesh, one)
    return sum(min(found.values()) for found in layers.values() if len(found) == len(names))
