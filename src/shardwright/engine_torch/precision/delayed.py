"""Delayed scaling in a step: products raise the amaxes of their operands in place, and the state follows from them.

The forward pass raises those of inputs and weights, the backward pass those of output gradients. A layer that is recomputed
raises its amaxes again, to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.core.quantization.delayed import DelayedScale
from shardwright.core.recipes.delayed import Delayed, after_step, factor_of
from shardwright.core.recipes.formats import FORMATS
from shardwright.core.recipes.formula import INFINITE, Quantized, amax_of, quantize, quantize_and_measure
from shardwright.core.recipes.recipe import History, Operand, Product, Quantizer
from shardwright.engine_torch.io.layer_io import LowPrecision
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.precision.arrays import ARRAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a rank keeps of tensors with one quantizer: their ``factor`` and ``history``, float32, between steps; and during a step
    their ``amax``, int32 bits of the factor's shape. All change in place."""

    factor: torch.Tensor
    history: torch.Tensor
    amax: torch.Tensor

    @classmethod
    def of(cls, factor: torch.Tensor, history: torch.Tensor) -> Kept:
        return cls(factor=factor, history=history, amax=torch.zeros_like(factor, dtype=torch.int32))

    def overflow(self, quantizer: Quantizer) -> torch.Tensor:
        """The largest element of the step by the largest that its factor holds; 0 where it is not finite, or where there was none."""
        finite = ARRAYS.of_bits(torch.where(self.amax < INFINITE, self.amax, 0))
        return finite * self.factor / FORMATS[quantizer.dtype].largest

    def follow(self, quantizer: Quantizer, rule: History, step: int | torch.Tensor) -> None:
        """Go on to after step ``step``, counted from 1, whose amaxes are reduced."""
        before = Delayed(factor=self.factor, history=self.history)
        after = after_step(before, self.amax, quantizer, rule, step, ARRAYS)
        self.factor.copy_(after.factor)
        self.history.copy_(after.history)
        self.amax.zero_()


def delayed_codes(
    low: LowPrecision,
    place: tuple[Product, Operand],
    groups: Sequence[torch.Tensor],
    randoms: Iterable[torch.Tensor | None],
    contracted_dims: int,
) -> Sequence[Quantized]:
    """The codes of each group of an operand with a delayed amax, as of each expert's rows. The first product with the operand raises the
    amax, where the site has one. ``randoms``: the numbers of stochastic rounding for each group."""
    name, quantizer = low.delayed[place], low.quantizers[place]
    first = next(each for each, its_name in low.delayed.items() if its_name == name)
    raises = place == first and name == f"{low.name}.{place[1]}" and name in low.site.amaxes
    codes, amaxes = [], []
    for x, factor, random in zip(groups, low.site.factors[name].reshape(-1).unbind(), randoms, strict=True):
        of_group = x.detach(), quantizer, ARRAYS
        if low.site.measured:
            factor = measured_factor(x, quantizer, factor, contracted_dims)
        if raises:
            made, amax = quantize_and_measure(*of_group, factor=factor, contracted_dims=contracted_dims, random=random)
            amaxes.append(amax.view(()))
        else:
            made = quantize(*of_group, factor=factor, contracted_dims=contracted_dims, random=random)
        codes.append(made)
    if amaxes:
        amax = low.site.amaxes[name]
        amax.copy_(torch.maximum(amax, torch.stack(amaxes).view(amax.shape)))
    return codes


def measured_factor(
    x: torch.Tensor, quantizer: Quantizer, factor: torch.Tensor, contracted_dims: int = 1
) -> torch.Tensor:
    """The factor of the elements that a tensor has now; ``factor`` where there are none, or one is not finite."""
    return factor_from(
        amax_of(x.detach(), quantizer, ARRAYS, contracted_dims=contracted_dims).view(()), quantizer, factor
    )


def factor_from(amax: torch.Tensor, quantizer: Quantizer, factor: torch.Tensor) -> torch.Tensor:
    """That of an amax, int32; ``factor`` where it is 0 or not finite."""
    return torch.where((amax > 0) & (amax < INFINITE), factor_of(amax, quantizer, ARRAYS), factor)


def reduce_amaxes(kept: Iterable[tuple[DelayedScale, Kept]], peers_over: Callable[[tuple[str, ...]], Peers]) -> None:
    """Every reduction of the plan: one for each set of axes. ``peers_over``: the ranks over axes."""
    by_axes: dict[tuple[str, ...], list[tuple[DelayedScale, Kept]]] = {}
    for scale, one in kept:
        if scale.operand.reduced:
            by_axes.setdefault(scale.operand.reduced, []).append((scale, one))
    for axes, found in by_axes.items():
        weight = found[0][0].weight
        with moving(weight.component, weight.name):
            reduce_together([one.amax for _, one in found], peers_over(axes))


def reduce_together(amaxes: Sequence[torch.Tensor], peers: Peers) -> None:
    """The largest over ranks of each of several amaxes, in place, by one collective."""
    if peers.group is None or not amaxes:
        return
    flat = torch.cat([one.reshape(-1) for one in amaxes])
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=peers.group)
    for one, largest in zip(amaxes, flat.split([one.numel() for one in amaxes]), strict=True):
        one.copy_(largest.view(one.shape))
