"""The copies of a weight that the products of a recipe need, as arrays that rest: outputs are dim 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.formats import E2M1, E8M0
from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.recipe import CONTRACTED, DIMS, Dim, Product, Quantizer, Recipe
from shardwright.engine_torch.precision.arrays import ARRAYS

Arrays = Sequence[torch.Tensor]
"""Codes, scales, and the scale of the tensor where there is one; outputs are dim 0 of the first two."""
DIM_OF: Mapping[Dim, int] = {"outputs": 0, "inputs": 1}
"""The dims of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of a weight at rest. ``product``: the one that contracts the dim along which its blocks lie."""

    product: Product
    quantizer: Quantizer

    @property
    def turned(self) -> bool:
        """Whether it is the transposed weight that is quantized; at rest its arrays are turned back, outputs first."""
        return self.product != "output"

    def extent(self, dim: Dim) -> int | None:
        """The elements of a dim that share a scale; None: all."""
        return self.quantizer.block.extents(self.product, "weight")[dim]

    def elements(self, dim: Dim) -> int:
        """The elements of a dim that lie in one byte of codes."""
        return 2 if self.quantizer.dtype == E2M1 and dim == CONTRACTED[self.product] else 1

    def entire(self) -> frozenset[Dim]:
        """The dims over which a scale is shared."""
        return frozenset(dim for dim in DIMS["weight"] if self.extent(dim) is None or self.quantizer.scale.of_tensor)

    def operand(self, weight: torch.Tensor) -> torch.Tensor:
        """The operand that is quantized, of a weight; and the same back."""
        return weight.mT if self.turned else weight

    def at_rest(self, quantized: Quantized) -> Arrays:
        codes, scales, of_tensor = quantized
        # PyTorch's compiler for CPUs and its collectives have no scales of E8M0, which are bytes.
        scales = scales.view(torch.uint8) if self.quantizer.scale.dtype == E8M0 else scales
        arrays = [self.operand(codes).contiguous(), self.operand(scales).contiguous()]
        return arrays if of_tensor is None else [*arrays, of_tensor]

    def quantized(self, arrays: Arrays) -> Quantized:
        """The inverse of ``at_rest``."""
        codes, scales, *of_tensor = arrays
        scales = ARRAYS.as_codes(scales, E8M0) if self.quantizer.scale.dtype == E8M0 else scales
        return Quantized(self.operand(codes), self.operand(scales), *(of_tensor or [None]))

    def values(self, arrays: Arrays, shape: Sequence[int]) -> torch.Tensor:
        """The values of codes, float32, of a weight of ``shape``."""
        turned_shape = shape[::-1] if self.turned else shape
        return self.operand(dequantize(self.quantized(arrays), turned_shape, self.quantizer, ARRAYS))

    def sent(self, number: int) -> bool:
        """Whether ranks that shard outputs have other elements of an array: codes, and scales of blocks of outputs."""
        return number == 0 or (number == 1 and self.extent("outputs") is not None)


def copies_of(recipe: Recipe) -> tuple[Copy, ...]:
    """The copies that the products of a recipe need: one, where both quantize the weight alike. None where a product multiplies the
    weight as it is, or after a transform: codes would not serve that."""
    products: tuple[Product, Product] = ("output", "input_gradient")
    copies = [
        Copy(product=of, quantizer=quantizer)
        for of in products
        if (quantizer := recipe.quantizers.get((of, "weight"))) is not None and quantizer.hadamard is None
    ]
    if len(copies) < len(products):
        return ()
    formats = {(copy.quantizer.dtype, copy.quantizer.scale, copy.quantizer.amax) for copy in copies}
    extents = [{dim: copy.extent(dim) for dim in DIMS["weight"]} for copy in copies]
    return tuple(copies[:1] if len(formats) == 1 and extents[0] == extents[1] else copies)


def require_copies(recipe: Recipe, label: str) -> None:
    """Raises InputError for a recipe whose weights no codes serve."""
    if not copies_of(recipe):
        raise InputError(
            f"{label}: under recipe '{recipe.name}' a product multiplies the weight in high precision or after a transform, and codes do not "
            f"have that. Leave out primary_weights, or quantize the weight in both products."
        )
