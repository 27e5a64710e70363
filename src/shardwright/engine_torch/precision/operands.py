"""The operands of a product as they are after quantization, and the ranks that agree on an amax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from shardwright.core.recipes.formula import Agree, Quantized, Shares, alone, amax_of, dequantize, quantize, shared_by
from shardwright.core.recipes.hadamard import transformed
from shardwright.core.recipes.recipe import PER_TENSOR, Operand, Product, Quantizer
from shardwright.engine_torch.io.layer_io import ALONE, LowPrecision, Site
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.recomputation import sent
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.random_bits import signs

Agreed = Sequence[torch.Tensor]
"""The amaxes of one operand on which ranks have agreed, int32: of each group of rows, as each expert's, or of the only one."""

Amaxes = Mapping[tuple[str, ...], Agreed]
"""Those of several operands, by ``LowPrecision.same_amax``."""

INPUT: tuple[Product, Operand] = ("output", "input")


def quantized(
    x: torch.Tensor,
    quantizer: Quantizer,
    peers: Peers = ALONE,
    contracted_dims: int = 1,
    factor: torch.Tensor | None = None,
) -> Quantized:
    """Codes and scales of a rank's shard of an operand, ``[..., other, *contracted]``.

    ``peers``: the ranks that hold parts of what shares a scale. ``factor``: of a tensor with a delayed amax.
    """

    def among_peers(amax: torch.Tensor, of: Shares) -> torch.Tensor:
        return _largest(amax, peers) if of == shared_by(quantizer) else amax

    agree = alone if peers.group is None else among_peers
    return quantize(x.detach(), quantizer, ARRAYS, contracted_dims=contracted_dims, agree=agree, factor=factor)


def codes_of(
    x: torch.Tensor,
    quantizer: Quantizer,
    agreed: torch.Tensor | None = None,
    contracted_dims: int = 1,
    factor: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> Quantized:
    """Codes and scales of an operand.

    ``agreed``: the amaxes of all ranks that hold parts of what shares a scale; None: this one has all. ``factor``: of a tensor with a
    delayed amax. ``random``: the numbers of stochastic rounding.
    """

    of_blocks = shared_by(quantizer) == "block"
    return quantize(
        x.detach(),
        quantizer,
        ARRAYS,
        contracted_dims=contracted_dims,
        agree=alone if of_blocks else to_agreed(agreed, quantizer),
        amax=agreed if of_blocks else None,
        factor=factor,
        random=random,
    )


def to_agreed(agreed: torch.Tensor | None, quantizer: Quantizer) -> Agree:
    """Every amax that is shared as the one on which ranks have agreed; None: as it is."""
    if agreed is None:
        return alone

    def agree(amax: torch.Tensor, of: Shares) -> torch.Tensor:
        return agreed.reshape(amax.shape) if of == shared_by(quantizer) else amax

    return agree


def values(
    x: torch.Tensor,
    quantizer: Quantizer,
    agreed: torch.Tensor | None = None,
    contracted_dims: int = 1,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of the operand's codes, float32."""
    codes = codes_of(x, quantizer, agreed, contracted_dims, factor)
    return dequantize(codes, x.shape, quantizer, ARRAYS, contracted_dims=contracted_dims)


def turned(groups: Sequence[torch.Tensor], quantizer: Quantizer, site: Site) -> Sequence[torch.Tensor]:
    """The groups of an operand after its random Hadamard transform along the last dim, float32; as they are where it has none."""
    if quantizer.hadamard is None:
        return groups
    of_places = signs(site, quantizer.hadamard, groups[0].device)
    return [transformed(x, of_places, ARRAYS) for x in groups]


def agreed_amax(
    groups: Sequence[torch.Tensor], low: LowPrecision, place: tuple[Product, Operand], contracted_dims: int = 1
) -> Agreed | None:
    """The amaxes of an operand, group by group, on which ranks agree in one collective. None where none has to, unless they are of entire
    tensors, and so of several products."""
    peers, quantizer = low.amax_peers.get(place, ALONE), low.quantizers.get(place)
    if quantizer is None or quantizer.amax == "delayed":
        return None
    if peers.group is None and quantizer.block != PER_TENSOR:
        return None
    own = [amax_of(x.detach(), quantizer, ARRAYS, contracted_dims=contracted_dims).flatten() for x in groups]
    with moving(low.component, low.name):
        return _largest(torch.cat(own), peers).split([one.numel() for one in own])


def input_amaxes(groups: Sequence[torch.Tensor], weights: Iterable[LowPrecision | None]) -> Amaxes:
    """The agreed amaxes of an input, whose features are the last dim, that several weights multiply: each once."""
    found: dict[tuple[str, ...], Agreed] = {}
    for low in weights:
        if low is not None and (key := low.same_amax.get(INPUT)) is not None and key not in found:
            agreed = agreed_amax([x.flatten(0, -2) for x in groups], low, INPUT)
            if agreed is not None:
                found[key] = agreed
    return found


def _largest(amax: torch.Tensor, peers: Peers) -> torch.Tensor:
    if peers.group is None:
        return amax

    def largest() -> torch.Tensor:
        found = amax.contiguous()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=peers.group)
        return found

    # A layer that is computed again quantizes again.
    return sent(largest, always=True)
