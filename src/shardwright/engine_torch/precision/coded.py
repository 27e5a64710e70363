"""A weight in use that was quantized on its shards at rest, and gathered as codes and scales.

Gradients go to the carrier, which has the weight's shape and dtype, and no values or memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.recipes.formats import E2M1
from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.kernels import KernelName
from shardwright.core.recipes.recipe import Block, Product, Quantizer
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.kernels import Narrow

Gathered = Quantized | torch.Tensor
"""A copy of a weight on a rank: codes and scales, or the weight itself where products do not quantize it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """An operand of a product, ``[..., other, contracted]``, of ``shape``. ``turned``: these are the codes of its transpose.
    ``dense``: its values instead of codes, of a slice that ends inside blocks."""

    quantized: Quantized
    quantizer: Quantizer
    shape: tuple[int, ...]
    turned: bool
    dense: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The values of the codes, float32."""
        if self.dense is not None:
            return self.dense
        own = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape
        found = dequantize(self.quantized, own, self.quantizer, ARRAYS)
        # In memory as the values of what is quantized after its gather, so that a product adds in the same order: bytes of two codes are made in
        # rows, and all others where the elements were.
        packed = self.quantizer.dtype == E2M1
        return (found.mT.contiguous() if packed else found.mT) if self.turned else found

    def kernel(self, planned: KernelName) -> KernelName:
        """The kernel of a product with it: one of codes needs codes."""
        return planned if self.dense is None else "float32"

    def narrow(self) -> list[Narrow]:
        """The matrix of each expert, or the only one, as a kernel takes it."""
        quantized, quantizer = self.quantized, self.quantizer
        if self.turned:
            block = Block(contracted=quantizer.block.other, other=quantizer.block.contracted)
            codes = quantized.codes.view(torch.uint8)
            codes = _turned_pairs(codes, self.shape[-2]) if quantizer.dtype == E2M1 else codes.mT.contiguous()
            quantized = quantized._replace(codes=codes.view(quantized.codes.dtype), scales=quantized.scales.mT)
            quantizer = replace(quantizer, block=block)
        if len(self.shape) == 2:
            return [Narrow(quantized, quantizer, self.shape)]
        of_each = zip(*(one.unbind() for one in quantized if one is not None), strict=True)
        return [Narrow(Quantized(*one, *[None] * (3 - len(one))), quantizer, self.shape[1:]) for one in of_each]


class Outputs(NamedTuple):
    """So many outputs of a weight from a first one."""

    start: int
    num: int

    def of(self, array: torch.Tensor, dim: int, per: int = 1) -> torch.Tensor:
        """Of an array of which an entry along ``dim`` is of ``per`` outputs."""
        return array.narrow(dim, self.start // per, self.num // per)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """``first``: the copy for outputs, which serves input gradients too where ``second`` is None. ``second``: gathers the other
    copy, in the backward pass. ``quantizers``: of both. ``sizes``: how many outputs and inputs the copies have. ``only``:
    the outputs in use; None: all."""

    carrier: torch.Tensor | None
    first: Gathered | None
    second: Callable[[], Gathered] | None
    quantizers: tuple[Quantizer | None, Quantizer | None]
    sizes: tuple[int, int]
    only: Outputs | None = None

    @property
    def shape(self) -> torch.Size:
        return carrier_of(self).shape

    @property
    def dtype(self) -> torch.dtype:
        return carrier_of(self).dtype

    def outputs(self, start: int, num: int) -> Coded:
        """Only so many outputs, which are dim 0 of the weight."""
        return replace(self, carrier=carrier_of(self).narrow(0, start, num), only=Outputs(start, num))

    def for_backward(self) -> tuple[Coded, Sequence[torch.Tensor]]:
        """What a backward pass needs: without tensors, and the tensors to save, with which ``restored`` is called."""
        held = () if self.second or self.first is None else _tensors(self.first)
        return replace(self, carrier=None, first=None), held

    def restored(self, held: Sequence[torch.Tensor]) -> Coded:
        if not held:
            return self
        quantized = self.quantizers[0] is not None
        return replace(self, first=Quantized(*held, *[None] * (3 - len(held))) if quantized else held[0])

    def operand(self, product: Product) -> Codes | torch.Tensor:
        """What a product multiplies: codes, or the weight itself, outputs first."""
        if product == "output" or self.second is None:
            found, quantizer, turned = self.first, self.quantizers[0], product != "output"
        else:
            found, quantizer, turned = self.second(), self.quantizers[1], False
        if not isinstance(found, Quantized):
            assert found is not None
            return found if self.only is None else self.only.of(found, 0)
        assert quantizer is not None
        sizes = self.sizes if product == "output" else self.sizes[::-1]
        codes = Codes(quantized=found, quantizer=quantizer, shape=(*found.codes.shape[:-2], *sizes), turned=turned)
        return codes if self.only is None else _sliced(codes, product, self.only)


def _turned_pairs(codes: torch.Tensor, last: int) -> torch.Tensor:
    """Bytes of two codes each, of which the last dim has so many, with that dim and the one before in turn.

    >>> _turned_pairs(torch.tensor([[0x21, 0x03], [0x54, 0x06]], dtype=torch.uint8), 3).tolist()
    [[65], [82], [99]]
    """
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :last].mT
    each = functional.pad(each, (0, each.shape[-1] % 2))
    return each[..., ::2] + each[..., 1::2] * 16


def carrier_of(weight: Coded | torch.Tensor) -> torch.Tensor:
    """What has the gradient of a weight in use."""
    if not isinstance(weight, Coded):
        return weight
    assert weight.carrier is not None
    return weight.carrier


def _tensors(gathered: Gathered) -> Sequence[torch.Tensor]:
    if not isinstance(gathered, Quantized):
        return (gathered,)
    return tuple(array for array in gathered if array is not None)


def _sliced(codes: Codes, product: Product, outputs: Outputs) -> Codes:
    of_operand, block = (-2 if product == "output" else -1), codes.quantizer.block
    dim = -3 - of_operand if codes.turned else of_operand
    extent = block.other if dim == -2 else block.contracted
    if extent is not None and outputs.num % extent:
        return replace(codes, dense=outputs.of(codes.values(), of_operand))
    packed = 2 if codes.quantizer.dtype == E2M1 and dim == -1 else 1
    scales = codes.quantized.scales
    sliced = codes.quantized._replace(
        codes=outputs.of(codes.quantized.codes, dim, packed),
        scales=scales if extent is None else outputs.of(scales, dim, extent),
    )
    shape = list(codes.shape)
    shape[of_operand] = outputs.num
    return replace(codes, quantized=sliced, shape=tuple(shape))
