"""How an operand is quantized: from its elements to codes and scales, and back. Written once, for the arrays of either engine.

An operand has the dims ``[..., other, *contracted]``: of a weight's products outputs and inputs, of tokens tokens and features.
Blocks begin at the edges of the array, and the last one of a dim may be smaller. Each index of the leading dims is an operand of
its own. A value is its code times the scale of its block, and times that of the tensor where there is one.

Scales that are powers of two are found in the bits of float32, so that no engine's logarithm rounds one differently:

| amax of a block | E8M0 | float32, power of two | float32, exact |
|---|---|---|---|
| ordinary | the exponent | the exponent | 1 / (largest / amax), each rounded to float32 |
| 0 | 2^-127, all codes 0 | 1 | 1 |
| so small that the scale would be below | 2^-127, all codes 0 | 2^-126 | 2^-126 |
| infinite | 2^127 up, 2^120 down: infinite values stay infinite | NaN | NaN |
| NaN | NaN, all codes NaN | NaN | NaN |

With a delayed amax the factor is given (``delayed.py``): an element beyond the range becomes its largest code, and an infinite one NaN.

Subnormal elements are 0, as they are on TPUs and in XLA's programs for CPUs. Values are clipped to the format's range before the
cast: beyond it one engine's cast gives NaN, another's infinity or the largest value. Rounded stochastically, a value becomes one
of its two neighbours before the cast, which is exact then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import frexp, nan
from typing import Any, Literal, NamedTuple

from shardwright.core.recipes.arrays import Arrays
from shardwright.core.recipes.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, NumberFormat
from shardwright.core.recipes.recipe import ENTIRE, PER_TENSOR, Block, Quantizer

Shares = Literal["block", "tensor"]
Agree = Callable[[Any, Shares], Any]
"""``agree(amax, of)``: for the amax of each block or tensor, the largest over all that shares its scale, on any device. It is
given as int32: bits of absolute values are ordered as these are, and NaN is above infinity."""

INFINITE = 0x7F800000
"""The bits of infinity; those of NaN are above, without their sign."""
LEAST_SCALE = 2.0**-126

_MAGNITUDE, _LEAST_NORMAL = 0x7FFFFFFF, 0x00800000
_FRACTION, _FRACTION_BITS, _BIAS = 0x007FFFFF, 23, 127
_NAN_OF_SCALE, _LARGEST_OF_SCALE = 255, 254
_NAN_BYTE = {E4M3: 0x7F, E5M2: 0x7E}
_RANDOM_BITS = 24
_LEAST_BLOCK_SCALE = 2.0**-6
_E2M1_MIDPOINTS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))
"""Between two neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6; True: the tie goes to the lower one, whose code is even."""


class Quantized(NamedTuple):
    """``codes``: in the narrow dtype, of the operand's shape; those of E2M1 as bytes of two, the first in the lower half, in
    the order of PyTorch's ``float4_e2m1fn_x2``. ``scales``: one a block. ``of_tensor``: the second scale, or None."""

    codes: Any
    scales: Any
    of_tensor: Any


class _Blocks(NamedTuple):
    """An operand in its blocks. ``split``: its shape with two dims for the other dim and two for the last contracted one.
    ``within``: the dims of ``split`` over which a scale is shared. ``num``: the shape of the scales."""

    shape: tuple[int, ...]
    leading: tuple[int, ...]
    padded: tuple[int, ...]
    split: tuple[int, ...]
    within: tuple[int, ...]
    num: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], block: Block, contracted_dims: int) -> _Blocks:
        """
        >>> _Blocks.of((300, 256), Block(contracted=128, other=128), 1).split
        (3, 128, 2, 128)
        >>> _Blocks.of((300, 4, 96), Block(contracted=128, other=1), 2).num
        (300, 4, 1)
        """
        *leading, other = shape[:-contracted_dims]
        *outer, last = shape[-contracted_dims:]
        of_other, of_last = block.other or max(other, 1), block.contracted or max(last, 1)
        num_other, num_last = max(1, -(-other // of_other)), max(1, -(-last // of_last))
        shared = range(len(leading) + 2, len(leading) + 2 + len(outer)) if block.contracted is ENTIRE else ()
        outer_num = [1] * len(outer) if block.contracted is ENTIRE else outer
        return cls(
            shape=tuple(shape),
            leading=tuple(leading),
            padded=(*leading, num_other * of_other, *outer, num_last * of_last),
            split=(*leading, num_other, of_other, *outer, num_last, of_last),
            within=(len(leading) + 1, *shared, len(leading) + len(outer) + 3),
            num=(*leading, num_other, *outer_num, num_last),
        )

    def divided(self, x: Any, on: Arrays) -> Any:
        for dim, size in enumerate(self.padded):
            if size != self.shape[dim]:
                x = on.padded(x, dim, size)
        return on.reshape(x, self.split)

    def joined(self, x: Any, on: Arrays) -> Any:
        x = on.reshape(x, self.padded)
        for dim, size in enumerate(self.shape):
            if size != self.padded[dim]:
                x = on.first(x, dim, size)
        return x

    def beside(self, scales: Any, on: Arrays) -> Any:
        """The scales, so that they multiply the divided operand."""
        return on.reshape(scales, [1 if dim in self.within else size for dim, size in enumerate(self.split)])


class _Scaled(NamedTuple):
    """``factors``: what the elements are multiplied by, one after the other. ``scales`` and ``of_tensor``: as they are stored, but that
    powers of two in E8M0 are bytes."""

    factors: tuple[Any, ...]
    scales: Any
    of_tensor: Any = None


def alone(amax: Any, of: Shares) -> Any:
    """``Agree`` where one device holds all that shares a scale."""
    del of
    return amax


def shared_by(quantizer: Quantizer) -> Shares:
    """The scale that devices agree on, where they hold parts of what shares it: a block of entire dims, or else the tensor's."""
    return "tensor" if quantizer.scale.of_tensor else "block"


def quantize(
    x: Any,
    quantizer: Quantizer,
    on: Arrays,
    *,
    contracted_dims: int = 1,
    agree: Agree = alone,
    amax: Any = None,
    factor: Any = None,
    random: Any = None,
) -> Quantized:
    """Codes and scales of an operand, any float dtype, whose last ``contracted_dims`` dims the product contracts.

    ``amax``: of each block, int32, where it is known and agreed on. ``factor``: what the elements are multiplied by where the amax is delayed, one number for each tensor among the leading dims.
    ``random``: where rounding is stochastic, int32 of the operand's shape, uniform from 0 to 2^24 - 1.
    """
    assert (factor is not None) == (quantizer.amax == "delayed"), quantizer
    assert (random is not None) == (quantizer.rounding == "stochastic"), quantizer
    blocks = _Blocks.of(x.shape, quantizer.block, contracted_dims)
    element, scale = FORMATS[quantizer.dtype], quantizer.scale
    if quantizer.amax == "delayed":
        found, scales = on.fused(_by_factor)(x, factor, random, quantizer, contracted_dims, on)
        return _quantized(found, scales, None, blocks, quantizer, on)
    # Not by exact scales: with quotients between two loops of a kernel, PyTorch's compiler stores all scaled elements in float32.
    in_blocks = scale.rule != "exact" and not scale.of_tensor and quantizer.block != PER_TENSOR
    if amax is None and agree is alone and in_blocks and on.in_rows(x):
        found, scales = on.fused(_in_blocks)(x, random, quantizer, contracted_dims, on)
        return _quantized(found, scales, None, blocks, quantizer, on)
    if amax is not None and quantizer.block == PER_TENSOR and not scale.of_tensor:
        found, scales = on.fused(_by_amax)(x, amax, random, quantizer, contracted_dims, on)
        return _quantized(found, scales, None, blocks, quantizer, on)
    amax = on.fused(_amax)(x, quantizer.block, contracted_dims, on) if amax is None else blocks.beside(amax, on)
    if scale.of_tensor:
        amax = agree(amax, "block")
        of_tensor = agree(_of_tensor(amax, blocks, on), "tensor")
        scaled = _two_levels(amax, of_tensor, element, on)
    else:
        scaled = on.fused(_of_amax)(agree(amax, "block"), quantizer, on)
    found = on.fused(_scaled_bytes)(x, scaled.factors, random, quantizer, contracted_dims, on)
    return _quantized(found, scaled.scales, scaled.of_tensor, blocks, quantizer, on)


def quantize_and_measure(
    x: Any, quantizer: Quantizer, on: Arrays, *, factor: Any, contracted_dims: int = 1, random: Any = None
) -> tuple[Quantized, Any]:
    """As ``quantize``, of an operand with a delayed amax; and ``amax_of`` it, for the factors to come. Both read it once."""
    assert quantizer.amax == "delayed", quantizer
    blocks = _Blocks.of(x.shape, quantizer.block, contracted_dims)
    found, scales, amax = on.fused(_by_factor_and_measured)(x, factor, random, quantizer, contracted_dims, on)
    return _quantized(found, scales, None, blocks, quantizer, on), amax


def _quantized(found: Any, scales: Any, of_tensor: Any, blocks: _Blocks, quantizer: Quantizer, on: Arrays) -> Quantized:
    scale = quantizer.scale
    of_powers = quantizer.amax == "current" and scale.rule != "exact" and not scale.of_tensor
    e8m0 = of_powers and scale.dtype == E8M0
    return Quantized(
        codes=on.as_codes(found, "uint8" if quantizer.dtype == E2M1 else quantizer.dtype),
        scales=on.reshape(on.as_codes(scales, E8M0) if e8m0 else scales, blocks.num),
        of_tensor=None if of_tensor is None else on.reshape(of_tensor, blocks.leading),
    )


def _in_blocks(x: Any, random: Any, quantizer: Quantizer, contracted_dims: int, on: Arrays) -> tuple[Any, Any]:
    scaled = _of_amax(_amax(x, quantizer.block, contracted_dims, on), quantizer, on)
    return _scaled_bytes(x, scaled.factors, random, quantizer, contracted_dims, on), scaled.scales


def _by_amax(x: Any, amax: Any, random: Any, quantizer: Quantizer, contracted_dims: int, on: Arrays) -> tuple[Any, Any]:
    amax = _Blocks.of(x.shape, quantizer.block, contracted_dims).beside(amax, on)
    scaled = _of_amax(amax, quantizer, on)
    return _scaled_bytes(x, scaled.factors, random, quantizer, contracted_dims, on), scaled.scales


def _by_factor(
    x: Any, factor: Any, random: Any, quantizer: Quantizer, contracted_dims: int, on: Arrays
) -> tuple[Any, Any]:
    factor = _Blocks.of(x.shape, quantizer.block, contracted_dims).beside(factor, on)
    return _scaled_bytes(x, (factor,), random, quantizer, contracted_dims, on), on.quotient(1.0, factor)


def _by_factor_and_measured(
    x: Any, factor: Any, random: Any, quantizer: Quantizer, contracted_dims: int, on: Arrays
) -> tuple[Any, Any, Any]:
    amax = _amax(x, quantizer.block, contracted_dims, on)
    return *_by_factor(x, factor, random, quantizer, contracted_dims, on), amax


def _amax(x: Any, block: Block, contracted_dims: int, on: Arrays) -> Any:
    """That of each block, int32, beside the divided operand."""
    return _of_blocks(on.bits(on.float32(x)) & _MAGNITUDE, _Blocks.of(x.shape, block, contracted_dims), on)


def _scaled_bytes(
    x: Any, factors: tuple[Any, ...], random: Any, quantizer: Quantizer, contracted_dims: int, on: Arrays
) -> Any:
    """The bytes of the codes of an operand whose elements are multiplied by ``factors``, which are beside the divided operand."""
    blocks, element = _Blocks.of(x.shape, quantizer.block, contracted_dims), FORMATS[quantizer.dtype]
    x = on.float32(x)
    magnitude = on.bits(x) & _MAGNITUDE
    x = on.where(magnitude < _LEAST_NORMAL, x * 0, x)
    if quantizer.amax == "delayed":
        # Values above the range are clipped, and infinite ones must not become finite.
        x = on.where(magnitude < INFINITE, x, nan)
    x = blocks.divided(x, on)
    for factor in factors:
        x = x * factor
    x = blocks.joined(on.most(on.least(x, element.largest), -element.largest), on)
    if random is not None:
        x = _neighbour(x, element, random, on)
    return _bytes(x, quantizer.dtype, on)


def amax_of(x: Any, quantizer: Quantizer, on: Arrays, *, contracted_dims: int = 1) -> Any:
    """What devices agree on (``shared_by``) as this one has it, int32."""
    amax = on.fused(_amax)(x, quantizer.block, contracted_dims, on)
    if shared_by(quantizer) == "block":
        return amax
    return _of_tensor(amax, _Blocks.of(x.shape, quantizer.block, contracted_dims), on)


def _of_blocks(magnitude: Any, blocks: _Blocks, on: Arrays) -> Any:
    amax = on.largest(blocks.divided(magnitude, on), blocks.within)
    return on.where(amax < _LEAST_NORMAL, amax * 0, amax)


def _of_tensor(amax: Any, blocks: _Blocks, on: Arrays) -> Any:
    return on.largest(amax, tuple(range(len(blocks.leading), len(amax.shape))))


def dequantize(
    quantized: Quantized, shape: Sequence[int], quantizer: Quantizer, on: Arrays, *, contracted_dims: int = 1
) -> Any:
    """The values of codes and scales, float32, of ``shape``. A scale below 2^-126 is 0 where subnormal numbers are."""
    blocks = _Blocks.of(shape, quantizer.block, contracted_dims)
    values = _values(quantized.codes, shape[-1], on) if quantizer.dtype == E2M1 else on.float32(quantized.codes)
    values, scales = blocks.divided(values, on), blocks.beside(quantized.scales, on)
    if quantizer.scale.dtype == E8M0:
        byte = on.int32(on.bytes_of(scales))
        factors = tuple(on.where(byte == _NAN_OF_SCALE, nan, half) for half in _halves(byte - _BIAS, on))
    else:
        factors = (on.float32(scales),)
    if quantized.of_tensor is not None:
        ones = [1] * (len(blocks.split) - len(blocks.leading))
        factors = (*factors, on.reshape(quantized.of_tensor, (*blocks.leading, *ones)))
    for factor in factors:
        values = values * factor
    return blocks.joined(values, on)


def _of_amax(amax: Any, quantizer: Quantizer, on: Arrays) -> _Scaled:
    of = _exact if quantizer.scale.rule == "exact" else _power_of_two
    return of(amax, quantizer, on)


def _power_of_two(amax: Any, quantizer: Quantizer, on: Arrays) -> _Scaled:
    element, up = FORMATS[quantizer.dtype], quantizer.scale.rule == "power of two up"
    fraction, exponent_of_largest = frexp(element.largest)
    fraction_of_largest = int((2 * fraction - 1) * 2**_FRACTION_BITS)
    exponent = (amax >> _FRACTION_BITS) - _BIAS - (exponent_of_largest - 1)
    if up:
        exponent = exponent + on.int32((amax & _FRACTION) > fraction_of_largest)
    if quantizer.scale.dtype == E8M0:
        byte = on.least(on.most(exponent + _BIAS, 0), _LARGEST_OF_SCALE)
        byte = on.where(amax == INFINITE, _LARGEST_OF_SCALE, byte) if up else byte
        byte = on.where(amax > INFINITE, _NAN_OF_SCALE, byte)
        # With the smallest scale nothing is scaled: all elements are far below the smallest code.
        halves = _halves(on.where(byte == 0, 0, _BIAS - byte), on)
        factors = tuple(on.where(amax > INFINITE, nan, half) for half in halves)
        return _Scaled(factors=factors, scales=on.as_bytes(byte))
    exponent = on.where(amax == 0, 0, on.least(on.most(exponent, 1 - _BIAS), _BIAS))
    first, second = _halves(-exponent, on)
    finite = amax < INFINITE
    scales = on.where(finite, on.of_bits((exponent + _BIAS) << _FRACTION_BITS), nan)
    return _Scaled(factors=(on.where(finite, first, nan), second), scales=scales)


def _exact(amax: Any, quantizer: Quantizer, on: Arrays) -> _Scaled:
    largest = FORMATS[quantizer.dtype].largest
    factor = on.quotient(largest, on.most(on.of_bits(amax), largest * LEAST_SCALE))
    finite = amax < INFINITE
    factor = on.where(amax == 0, 1.0, on.where(finite, factor, nan))
    # Each device has a NaN of its own for a quotient of one.
    return _Scaled(factors=(factor,), scales=on.where(finite, on.quotient(1.0, factor), nan))


def _two_levels(amax: Any, amax_of_tensor: Any, element: NumberFormat, on: Arrays) -> _Scaled:
    """A float32 scale of the tensor, by which those of blocks fit E4M3 (arXiv:2509.25149, appendix C.1)."""
    of_scale = FORMATS[E4M3]
    largest = element.largest * of_scale.largest
    of_tensor = on.quotient(on.most(on.of_bits(amax_of_tensor), largest * LEAST_SCALE), largest)
    of_tensor = on.where(amax_of_tensor == 0, 1.0, on.where(amax_of_tensor < INFINITE, of_tensor, nan))
    relative = on.quotient(on.quotient(on.of_bits(amax), element.largest), of_tensor)
    relative = on.most(on.least(relative, of_scale.largest), _LEAST_BLOCK_SCALE)
    scales = on.as_codes(_bytes(relative, E4M3, on), E4M3)
    factor = on.quotient(on.quotient(1.0, of_tensor), on.float32(scales))
    return _Scaled(factors=(factor,), scales=scales, of_tensor=of_tensor)


def _halves(exponent: Any, on: Arrays) -> tuple[Any, Any]:
    """Two powers of two whose product is that of an int32 exponent from -127 to 127. Neither is subnormal."""
    first = exponent >> 1
    return _power(first, on), _power(exponent - first, on)


def _power(exponent: Any, on: Arrays) -> Any:
    return on.of_bits((exponent + _BIAS) << _FRACTION_BITS)


def _neighbour(x: Any, element: NumberFormat, random: Any, on: Arrays) -> Any:
    """The upper or the lower neighbour of each value in the format, as often as its distance from the other one, in units of
    2^-24 of the distance of the two. All values from the smallest normal one of the format on have such a distance exactly."""
    bits = on.bits(x)
    magnitude, not_a_number = bits & _MAGNITUDE, x != x
    magnitude = on.where(not_a_number, 0, magnitude)
    # That of the distance between two neighbours.
    exponent = on.most((magnitude >> _FRACTION_BITS) - _BIAS, element.least_exponent) - element.mantissa
    distances = on.int32(on.of_bits(magnitude) * _power(_RANDOM_BITS - exponent, on))
    value = on.float32((distances + random) >> _RANDOM_BITS) * _power(exponent, on)
    return on.where(not_a_number, x, on.of_bits(on.bits(value) | (bits & ~_MAGNITUDE)))


def _bytes(x: Any, dtype: str, on: Arrays) -> Any:
    """Values within the format's range, or NaN, to the bytes of the nearest codes. NaN has one code, whatever its sign."""
    if dtype == E2M1:
        return _pairs(x, on)
    return on.as_bytes(on.where(x != x, _NAN_BYTE[dtype], on.bytes_of(on.cast(x, dtype))))


def _pairs(x: Any, on: Arrays) -> Any:
    """Two codes of E2M1 a byte. There is no NaN among them: it is the largest, and the scale of its block is NaN."""
    if x.shape[-1] % 2:
        x = on.padded(x, len(x.shape) - 1, x.shape[-1] + 1)
    bits = on.bits(x)
    size = on.of_bits(bits & _MAGNITUDE)
    steps = [1 - on.int32(size <= point if ties_down else size < point) for point, ties_down in _E2M1_MIDPOINTS]
    code = sum(steps[1:], steps[0]) + on.where(x != x, 0, (bits >> 31) & 1) * 8
    pairs = on.reshape(code, (*code.shape[:-1], code.shape[-1] // 2, 2))
    return on.as_bytes(pairs[..., 0] + pairs[..., 1] * 16)


def _values(codes: Any, last: int, on: Arrays) -> Any:
    """The values of bytes of two codes of E2M1 each, float32, of which the last dim has so many."""
    byte = on.reshape(on.int32(codes), (*codes.shape, 1))
    code = on.joined(byte & 15, byte >> 4)
    code = on.reshape(code, (*codes.shape[:-1], codes.shape[-1] * 2))
    size = code & 7
    # From 1 on: 1 or 1.5 times a power of two. Below: 0 and 0.5.
    ordinary = on.float32((size & 1) + 2) * _power((size >> 1) - 2, on)
    values = on.where(size < 2, on.float32(size) * 0.5, ordinary)
    values = on.where(code > 7, -values, values)
    return values if code.shape[-1] == last else on.first(values, len(code.shape) - 1, last)
