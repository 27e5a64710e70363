"""The three products with a weight of which operands are quantized.

A product of two quantized operands is computed by the kernel that the core chooses for the device (``core/recipes/kernels.py``).
``float32`` multiplies the values of the codes: it differs from the exact sum of K terms by at most K * 2^-24 of the sum of their
absolute values.

I and O are the input and output widths of a weight; R rows, sorted by expert; E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwright.core.recipes.formula import dequantize
from shardwright.core.recipes.kernels import kernel_named
from shardwright.core.recipes.recipe import OPERANDS, Operand, Product
from shardwright.engine_torch.io.dtypes import kept
from shardwright.engine_torch.io.layer_io import LowPrecision, halves_wanted
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.coded import Coded, Codes, carrier_of
from shardwright.engine_torch.precision.delayed import delayed_codes
from shardwright.engine_torch.precision.grouped import multiplied_by_expert
from shardwright.engine_torch.precision.kernels import Narrow, multiplied
from shardwright.engine_torch.precision.operands import Amaxes, agreed_amax, codes_of, turned
from shardwright.engine_torch.precision.random_bits import random_numbers


def quantized_product(
    x: torch.Tensor, weight_OI: torch.Tensor | Coded, dtype: torch.dtype, low: LowPrecision, amaxes: Amaxes
) -> torch.Tensor:
    """Tokens, whose features are the last dim, times a weight, and the two products of the backward pass, as a recipe has them.

    The last dim of tokens has the blocks of the weight's gradient. ``dtype``: of the result; ``amaxes``: those of the input that are agreed on already.
    """
    return _Quantized.apply(x, carrier_of(weight_OI), _coded(weight_OI), dtype, low, amaxes)  # pyright: ignore[reportReturnType]


def quantized_grouped_product(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor | Coded, rows: Sequence[int], low: LowPrecision, amaxes: Amaxes
) -> torch.Tensor:
    """Each row times the matrix of its own expert, RO. ``rows``: of each expert. Each expert's rows are an operand of their own,
    as its matrix is."""
    return _Grouped.apply(x_RI, carrier_of(weight_EOI), _coded(weight_EOI), rows, low, amaxes)  # pyright: ignore[reportReturnType]


_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]


class _Quantized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        carrier_OI: torch.Tensor,
        coded: Coded | None,
        dtype: torch.dtype,
        low: LowPrecision,
        amaxes: Amaxes,
    ) -> torch.Tensor:
        _save(ctx, x, carrier_OI, coded)
        ctx.low = low
        operand = carrier_OI if coded is None else coded.operand("output")
        (y,), ctx.amaxes = _multiplied("output", [x.flatten(0, -2)], _each(operand), low, amaxes)
        return y.view(*x.shape[:-1], carrier_OI.shape[0]).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents: torch.Tensor) -> _Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = _saved(ctx)
        cotangent = cotangents[0].to(kept("cotangent", x.dtype))
        d_x = d_weight_OI = None
        # What the first half has agreed on is left for the second.
        of_input, of_weight = halves_wanted(ctx, split=ctx.low.split)
        amaxes = ctx.amaxes if of_input else ctx.left
        low = replace(ctx.low, site=ctx.low.site.of_next_pass())
        if of_input:
            transposed = _each(_inputs_first(weight))
            tokens = [cotangent.flatten(0, -2)]
            (d_x,), amaxes = _multiplied("input_gradient", tokens, transposed, low, amaxes)
            d_x = d_x.view(x.shape).to(x.dtype)
        if of_weight:
            tokens_last = ([x.movedim(-1, 0)], [cotangent.movedim(-1, 0)])
            (d_IO,), _ = _multiplied("weight_gradient", *tokens_last, low, amaxes, contracted_dims=x.dim() - 1)
            d_weight_OI = d_IO.T.to(ctx.dtype)
        ctx.left = amaxes
        return d_x, d_weight_OI, None, None, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_RI: torch.Tensor,
        carrier_EOI: torch.Tensor,
        coded: Coded | None,
        rows: Sequence[int],
        low: LowPrecision,
        amaxes: Amaxes,
    ) -> torch.Tensor:
        _save(ctx, x_RI, carrier_EOI, coded)
        ctx.low, ctx.rows = low, list(rows)
        operand = carrier_EOI if coded is None else coded.operand("output")
        ys, ctx.amaxes = _multiplied("output", x_RI.split(ctx.rows), _each(operand), low, amaxes)
        return torch.cat(ys).to(x_RI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents: torch.Tensor) -> _Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RI, weight = _saved(ctx)
        d_RO = cotangents[0].to(x_RI.dtype)
        xs, ds = x_RI.split(ctx.rows), d_RO.split(ctx.rows)
        d_x_RI = d_weight_EOI = None
        # What the first half has agreed on is left for the second.
        of_input, of_weight = halves_wanted(ctx, split=ctx.low.split)
        amaxes = ctx.amaxes if of_input else ctx.left
        low = replace(ctx.low, site=ctx.low.site.of_next_pass())
        if of_input:
            d_xs, amaxes = _multiplied("input_gradient", ds, _each(_inputs_first(weight)), low, amaxes)
            d_x_RI = torch.cat(d_xs).to(x_RI.dtype)
        if of_weight:
            d_weights, _ = _multiplied("weight_gradient", [x.T for x in xs], [d.T for d in ds], low, amaxes)
            d_weight_EOI = torch.stack([d.T for d in d_weights]).to(ctx.dtype)
        ctx.left = amaxes
        return d_x_RI, d_weight_EOI, None, None, None, None


def _coded(weight: torch.Tensor | Coded) -> Coded | None:
    return weight if isinstance(weight, Coded) else None


def _save(ctx: Any, x: torch.Tensor, carrier: torch.Tensor, coded: Coded | None) -> None:
    """Tensors by ``save_for_backward``, so that a recomputation makes them again; of codes, those that the backward pass needs."""
    ctx.dtype = carrier.dtype
    ctx.coded, held = (None, (carrier,)) if coded is None else coded.for_backward()
    ctx.save_for_backward(x, *held)


def _saved(ctx: Any) -> tuple[torch.Tensor, torch.Tensor | Coded]:
    x, *held = ctx.saved_tensors
    return x, held[0] if ctx.coded is None else ctx.coded.restored(held)


def _inputs_first(weight: torch.Tensor | Coded) -> torch.Tensor | Codes:
    operand = weight.operand("input_gradient") if isinstance(weight, Coded) else weight
    return operand if isinstance(operand, Codes) else operand.mT


def _each(operand: torch.Tensor | Codes) -> Sequence[torch.Tensor] | Codes:
    """The matrix of each expert, or the only one."""
    return operand if isinstance(operand, Codes) else _matrices(operand)


def _matrices(operand: torch.Tensor) -> Sequence[torch.Tensor]:
    return operand.unbind() if operand.dim() == 3 else [operand]


def _multiplied(
    name: Product,
    xs: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor] | Codes,
    low: LowPrecision,
    amaxes: Amaxes,
    *,
    contracted_dims: int = 1,
) -> tuple[list[torch.Tensor], Amaxes]:
    """As ``_sums``, without autocast, which would multiply the values of codes in a narrower dtype."""
    with torch.autocast(xs[0].device.type, enabled=False):
        return _sums(name, xs, ys, low, amaxes, contracted_dims=contracted_dims)


def _sums(
    name: Product,
    xs: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor] | Codes,
    low: LowPrecision,
    amaxes: Amaxes,
    *,
    contracted_dims: int = 1,
) -> tuple[list[torch.Tensor], Amaxes]:
    """For each pair of operands the sums over their last ``contracted_dims`` dims, in float32 or else in the operands' dtype; and
    all amaxes that are agreed on now."""
    places: list[tuple[Product, Operand]] = [(name, operand) for operand in OPERANDS[name]]
    all_narrow = all(place in low.quantizers for place in places)
    kernel = low.kernels.get(name, "float32")
    if isinstance(ys, Codes):
        kernel = ys.kernel(kernel)
    operands: list[Sequence[torch.Tensor]] = []
    narrow_operands: list[Sequence[Narrow]] = []
    for place, groups in zip(places, (xs, ys), strict=True):
        if isinstance(groups, Codes):
            if kernel != "float32":
                narrow_operands.append(groups.narrow())
                continue
            operands.append(_matrices(groups.values() if all_narrow else groups.values().to(xs[0].dtype)))
            continue
        quantizer = low.quantizers.get(place)
        if quantizer is None:
            operands.append([one.flatten(1) for one in groups])
            continue
        dtype, groups = groups[0].dtype, turned(groups, quantizer, low.site)
        key = low.same_amax.get(place, place)
        agreed = amaxes[key] if key in amaxes else agreed_amax(groups, low, place, contracted_dims)
        amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
        randoms = (random_numbers(place, low, one, number) for number, one in enumerate(groups))
        if quantizer.amax == "delayed":
            codes = delayed_codes(low, place, groups, randoms, contracted_dims)
        else:
            amax_of_each = [None] * len(groups) if agreed is None else agreed
            of_each = zip(groups, amax_of_each, randoms, strict=True)
            codes = [codes_of(x, quantizer, amax, contracted_dims, random=random) for x, amax, random in of_each]
        if kernel != "float32":
            narrow_operands.append(
                [Narrow(*each) for each in zip(codes, repeat(quantizer), (one.shape for one in groups))]
            )
            continue
        narrow = [
            dequantize(found, one.shape, quantizer, ARRAYS, contracted_dims=contracted_dims).flatten(1)
            for found, one in zip(codes, groups, strict=True)
        ]
        operands.append(narrow if all_narrow else [one.to(dtype) for one in narrow])
    # Rows of a product are contiguous, and those of a weight's gradient are its outputs.
    turns = name == "weight_gradient"
    if narrow_operands:
        left, right = narrow_operands[::-1] if turns else narrow_operands
        if kernel_named(kernel, "aten").of_experts:
            made = multiplied_by_expert(kernel, name, left, right)
        else:
            made = [multiplied(kernel, x, y) for x, y in zip(left, right, strict=True)]
    else:
        left, right = operands[::-1] if turns else operands
        made = [x @ y.T for x, y in zip(left, right, strict=True)]
    return [one.T for one in made] if turns else made, amaxes
