"""Random bits (``core/recipes/random_bits.py``) by PyTorch's operations, and the counters of the elements that a rank has.

N rows of an operand, M columns, P pairs of these; B rows of the batch, S tokens of each, as they are in the operand. Counters and bits are int32; their sums wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shardwright.core.quantization.elements import Elements, Tiled
from shardwright.core.recipes.random_bits import (
    MASK,
    PARITY,
    ROTATIONS,
    ROUNDING_BITS,
    SIGNS,
    Words,
    rounding_of,
    stride_of,
    words_of,
)
from shardwright.core.recipes.recipe import CONTRACTED, DIMS, Dim, Operand, Product
from shardwright.engine_torch.io.layer_io import Coordinates, LowPrecision, Site

NO_ELEMENTS = Elements(dims={})

# A compiler of a user's program takes the words as they are: it cannot follow a hash.
_rounding_of = torch.compiler.assume_constant_result(rounding_of)

Key = Words | Sequence[torch.Tensor]
"""Two words: numbers, or int32 without dims where the device has them, so that no one waits for it."""


def threefry(key: Key, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of each counter, whose two words have one shape or broadcast."""
    first, second = torch.broadcast_tensors(first, second)
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = first + _signed(keys[0]), second + _signed(keys[1])
    for four in range(5):
        for by in ROTATIONS[four % 2]:
            x += y
            # A shift to the right copies the sign.
            high = (y >> (32 - by)).bitwise_and_((1 << by) - 1)
            y = (y << by).bitwise_or_(high).bitwise_xor_(x)
        x += _signed(keys[(four + 1) % 3])
        y += _signed(keys[(four + 2) % 3] + four + 1)
    return x, y


def signs(site: Site, size: int, device: torch.device) -> torch.Tensor:
    """1 or -1 for each place of a group of the Hadamard transform, float32: the same in all steps and layers of a run."""
    words = torch.stack([*_of_run(SIGNS, site, device)])
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    return 1.0 - 2.0 * bits.flatten()[:size].float()


def random_numbers(
    place: tuple[Product, Operand], low: LowPrecision, x: torch.Tensor, group: int | None
) -> torch.Tensor | None:
    """For stochastic rounding of an operand, ``[other, *contracted]``, a number for each element, int32 below 2^24; None where it is
    rounded to the nearest. ``group``: the expert of this rank whose rows or whose matrix it is."""
    if low.quantizers[place].rounding != "stochastic":
        return None
    (product, operand), elements = place, low.elements.get(place, NO_ELEMENTS)
    first, second = DIMS[operand]
    by_columns = CONTRACTED[product] == first
    other, *contracted = x.shape
    rows, columns = (prod(contracted), other) if by_columns else (other, prod(contracted))
    filled = contracted[-1] if by_columns else None
    row_N = _row_numbers(elements, first, low.site, rows, filled, low.here)
    column_M, even, total = torch.arange(columns, dtype=torch.int32), columns % 2 == 0, columns
    if (dims := elements.dims.get(second)) is not None:
        own = _numbers(dims, low.here)
        if len(own) == columns:
            column_M, even, total = own, dims[-1].width % 2 == 0, prod(one.size for one in dims)
    # Two neighbours have one counter, and a word of its bits each.
    pair_P = (column_M[::2] if even else column_M) >> 1
    if group is not None:
        pair_P = pair_P + signed(_of_all(group, elements, low.here) * ((total + 1) // 2))
    moment = (_word(one, x.device) for one in (low.site.step, low.site.layer))
    key = threefry(_of_run(_rounding_of(product, operand, low.name), low.site, x.device), *moment)
    words = threefry(key, row_N.to(x.device)[:, None], pair_P.to(x.device)[None])
    if even:
        bits = torch.stack(words, dim=-1).flatten(1)
    else:
        bits = torch.where((column_M & 1 == 1).to(x.device), words[1], words[0])
    bits = (bits >> (32 - ROUNDING_BITS)) & ((1 << ROUNDING_BITS) - 1)
    return (bits.T if by_columns else bits).reshape(x.shape)


def _of_run(words: Words, site: Site, device: torch.device) -> Sequence[torch.Tensor]:
    first, second = site.seed if isinstance(site.seed, torch.Tensor) else words_of(site.seed)
    return threefry(words, _word(first, device), _word(second, device))


def _signed(word: int | torch.Tensor) -> int | torch.Tensor:
    return word if isinstance(word, torch.Tensor) else signed(word)


def _word(number: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The 32 low bits of a number, int32 without dims."""
    return (
        number if isinstance(number, torch.Tensor) else torch.full((), signed(number), dtype=torch.int32, device=device)
    )


def _row_numbers(
    elements: Elements, dim: Dim, site: Site, num: int, filled: int | None, here: Coordinates
) -> torch.Tensor:
    """The first counter of each of ``num`` rows. ``filled``: so many tokens of each row of the batch, with those that fill it up."""
    counted = torch.arange(num, dtype=torch.int32)
    if dim not in elements.dims:
        return counted
    if dim != "tokens":
        found = _numbers(elements.dims[dim], here)
    else:
        rows, positions = elements.dims[dim]
        row_B = _numbers((rows,), here) * elements.microbatches + site.microbatch
        position_S = _numbers((positions,), here)
        if filled is not None and filled > len(position_S) and filled * len(row_B) == num:
            more = torch.arange(1, filled - len(position_S) + 1, dtype=torch.int32)
            position_S = torch.cat((position_S, position_S[-1] + more))
        found = (row_B[:, None] * stride_of(positions.size) + position_S).flatten()
    # Of the keys of a ring, which are on another rank in each step of it.
    return found if len(found) == num else counted


def _numbers(dims: Sequence[Tiled], here: Coordinates) -> torch.Tensor:
    """The places of this rank's elements in merged dims."""
    found = torch.zeros(1, dtype=torch.int32)
    for dim in dims:
        own = [torch.arange(one.start, one.stop, dtype=torch.int32) for one in dim.of_device(*here(dim.axes))]
        found = (found[:, None] * dim.size + torch.cat(own)).flatten()
    return found


def _of_all(expert: int, elements: Elements, here: Coordinates) -> int:
    """The number of this rank's part of an expert among those of all ranks that have one."""
    first = 0
    if elements.experts is not None:
        index, num = here(elements.experts.axes)
        first = index * (elements.experts.size // num)
    return (expert + first) * elements.num_sources + here(elements.sources)[0]


def signed(word: int) -> int:
    """The 32 low bits of a number as int32."""
    word &= MASK
    return word - (1 << 32) if word >> 31 else word
