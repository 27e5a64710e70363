"""FSDP parameter groups of which codes and scales are gathered (``core/quantization/links.py``): by this file, as bytes.

``fully_shard`` gathers the same arrays in every pass. Here the backward pass gathers another copy of a weight than the forward
pass, where products quantize it along different dims. Nothing is gathered ahead of its layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil
from typing import NamedTuple

import torch

from shardwright.core.model.precision import in_use_dtype
from shardwright.core.plan.fsdp_groups import FsdpGroup, WeightOfLayer, component_of
from shardwright.core.plan.movement import reshard_steps
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.quantized import Copy, QuantizedWeight, SentArray
from shardwright.core.recipes.formula import Quantized, amax_of, quantize
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import NO_SITE, LowPrecision, Site
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import all_gather, reduce_scatter
from shardwright.engine_torch.io.recomputation import sent as in_one
from shardwright.engine_torch.io.redistribute import redistribute
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.coded import Coded, Gathered
from shardwright.engine_torch.precision.operands import Agreed, Amaxes, agreed_amax, to_agreed


class CodedGroup:
    """One group of a layer. ``gathered`` is called where the layer is computed, so that a recomputation gathers again.

    ``rests``: between steps a rank has codes in place of the weights; ``resting``: these, by the weights' keys the arrays of each copy.
    """

    def __init__(self, group: FsdpGroup, plan: Plan, low: Mapping[str, LowPrecision], ranks: Ranks) -> None:
        assert group.of_codes, group
        planned = {one.name: one for one in plan.quantized}
        self.group, self.peers, self.mesh = group, ranks.peers(group.axes), ranks.mesh
        self.members = [_Member.of(one, planned[one.weight], low[one.weight], plan, ranks) for one in group.weights]
        self.rests = any(planned[one.weight].rests for one in group.weights)
        self.resting: dict[str, Sequence[Sequence[torch.Tensor]]] = {}

    @torch.no_grad()
    def rest_as_codes(self, key: str, shard: torch.Tensor) -> None:
        """Keep the copies of a weight as it rests, by its key; ``shard``: the weight at rest, which is not kept."""
        [member] = [one for one in self.members if one.one.key == key]
        amaxes: Amaxes = {}
        found: list[Sequence[torch.Tensor]] = []
        for number in range(len(member.copies)):
            with self.moving([member]):
                arrays, amaxes = member.at_rest(number, shard, amaxes, NO_SITE)
            found.append(arrays)
        self.resting[key] = found

    def gathered(self, shards: Mapping[str, torch.Tensor], site: Site) -> Mapping[str, Coded]:
        """The weights of the group by their keys. ``shards``: at rest, without values where codes rest; ``site``: of their products."""
        own = [shards[member.one.key] for member in self.members]
        call = _Call(self, own, site)
        carriers = _WithCarriers.apply(call, *own)
        first, call.first = call.first, {}
        return {
            member.one.key: Coded(
                carrier=carrier,
                first=first[member.one.key],
                second=(lambda key=member.one.key: call.second()[key]) if len(member.copies) > 1 else None,
                quantizers=member.quantizers,
                sizes=member.sizes,
            )
            for member, carrier in zip(self.members, carriers, strict=True)
        }

    def scattered(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shards of the summed gradients, in one collective."""
        dtype = torch_dtype(self.group.weights[0].reduce_dtype)
        rows = [
            member.padded(cotangent.to(dtype), member.rows * self.peers.size).view(self.peers.size, -1)
            for member, cotangent in zip(self.members, cotangents, strict=True)
        ]
        full = torch.cat(rows, dim=1).flatten()
        out = full.new_empty(full.numel() // self.peers.size)
        assert self.peers.group is not None
        with self.moving(self.members):
            reduce_scatter(out, full, self.peers.group)
        shards = out.split([row.shape[1] for row in rows])
        return [
            shard.view(member.rows, *member.inner)[: member.own_rows]
            for member, shard in zip(self.members, shards, strict=True)
        ]

    def moving(self, members: Sequence[_Member]) -> AbstractContextManager[None]:
        """The name of a collective of some of its weights."""
        return moving(component_of([member.one for member in members], self.mesh), members[0].low.name)


class _Call:
    """The gathers of one group in one pass of a layer and in its backward pass. ``first``: until they are handed out."""

    def __init__(self, group: CodedGroup, shards: Sequence[torch.Tensor], site: Site) -> None:
        self.group, self.shards, self.site = group, [shard.detach() for shard in shards], site
        self.amaxes: dict[str, Amaxes] = {}
        self.first: Mapping[str, Gathered] = {}
        self._second: Mapping[str, Gathered] | None = None

    def second(self) -> Mapping[str, Gathered]:
        """The copies for input gradients, all gathered when the first of them is needed."""
        if self._second is None:
            self._second = self.gather(1)
        return self._second

    def gather(self, number: int) -> Mapping[str, Gathered]:
        """All copies of this number of the group, as bytes in one collective."""
        sent: list[tuple[_Member, list[torch.Tensor]]] = []
        for member, shard in zip(self.group.members, self.shards, strict=True):
            if number >= len(member.copies):
                continue
            if self.group.rests:
                sent.append((member, list(self.group.resting[member.one.key][number])))
            else:
                known = self.amaxes.get(member.one.key, {})
                arrays, self.amaxes[member.one.key] = member.at_rest(number, shard, known, self.site)
                sent.append((member, arrays))
        peers = self.group.peers
        moved = [
            array.movedim(dim, 0).contiguous()
            for member, arrays in sent
            for array, dim in zip(arrays, member.dims(number), strict=True)
            if dim is not None
        ]
        flat = torch.cat([array.view(torch.uint8).flatten() for array in moved])

        def gathered() -> torch.Tensor:
            out = flat.new_empty(peers.size * flat.numel())
            assert peers.group is not None
            all_gather(out, flat, peers.group)
            return out

        with self.group.moving([member for member, _ in sent]):
            out = in_one(gathered, always=True)
        parts = iter(out.view(peers.size, -1).split([array.nbytes for array in moved], dim=1))
        found = {}
        for member, arrays in sent:
            whole = []
            for array, dim in zip(arrays, member.dims(number), strict=True):
                if dim is None:
                    whole.append(array)
                    continue
                of_all = array.movedim(dim, 0)
                joined = next(parts).contiguous().view(array.dtype).view(-1, *of_all.shape[1:])
                whole.append(joined.movedim(0, dim))
            found[member.one.key] = member.in_use(number, whole)
        return found


class _WithCarriers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.dtypes = call.group, [shard.dtype for shard in shards]
        call.first = call.gather(0)
        return tuple(member.carrier(shards[0].device) for member in call.group.members)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group: CodedGroup = ctx.group
        shards = group.scattered(cotangents)
        return None, *(shard.to(dtype) for shard, dtype in zip(shards, ctx.dtypes, strict=True))


class _Member(NamedTuple):
    """A weight of a group. ``rows``: of dim 0 on each rank at rest, with padding; ``own_rows``: of this rank. ``inner``: its other
    dims. ``gathered_rows``: of dim 0 when gathered, and ``first_row``: the first one of them that this rank has at rest.
    ``sizes``: outputs and inputs in use."""

    one: WeightOfLayer
    low: LowPrecision
    copies: tuple[Copy, ...]
    ranks: Ranks
    dtype: torch.dtype
    rows: int
    own_rows: int
    inner: tuple[int, ...]
    gathered_rows: int
    first_row: int
    sizes: tuple[int, int]

    @classmethod
    def of(cls, one: WeightOfLayer, weight: QuantizedWeight, low: LowPrecision, plan: Plan, ranks: Ranks) -> _Member:
        mesh = plan.mesh
        rows, *inner = (size // mesh.size(dim.axes) for size, dim in zip(one.shape, one.in_use.dims, strict=True))
        box = one.box(mesh, ranks.rank)
        codes = next(array for copy in weight.copies for array in copy.arrays[:1])
        in_use = {name: one.shape[n] for n, name in enumerate(one.in_use.logical_axes)}
        sizes = [
            in_use[names[0]] // mesh.size(codes.in_use.axes_of(names[0])) for names in (weight.outputs, weight.inputs)
        ]
        table_weight = plan.request.table.weight(one.weight)
        own_rows = ceil(rows / mesh.size(one.gathered))
        return cls(
            one=one,
            low=low,
            copies=weight.copies,
            ranks=ranks,
            dtype=torch_dtype(in_use_dtype(table_weight, plan.request.dtype)),
            rows=own_rows,
            own_rows=0 if box is None else box.shape[0],
            inner=tuple(inner),
            gathered_rows=rows,
            first_row=ranks.peers(one.gathered).index * own_rows,
            sizes=(sizes[0], sizes[1]),
        )

    @property
    def quantizers(self) -> tuple[Quantizer | None, Quantizer | None]:
        """Those of the copies for outputs and for input gradients, which may be one."""
        first, *others = self.copies
        return first.quantizer, others[0].quantizer if others else first.quantizer

    def carrier(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.gathered_rows, *self.inner)

    def padded(self, array: torch.Tensor, rows: int) -> torch.Tensor:
        if array.shape[0] == rows:
            return array.contiguous()
        return torch.cat([array, array.new_zeros((rows - array.shape[0], *array.shape[1:]))])

    def at_rest(
        self, number: int, shard: torch.Tensor, amaxes: Amaxes, site: Site
    ) -> tuple[list[torch.Tensor], Amaxes]:
        """The arrays of a copy on this rank, in the order of ``Copy.arrays``, and the amaxes that are agreed on now."""
        copy = self.copies[number]
        # The codes are those of a weight that is quantized after it was gathered.
        narrow = self.padded(shard.to(torch_dtype(self.one.gather_dtype)), self.rows)
        if copy.quantizer is None:
            return [narrow], amaxes
        product: Product = copy.products[0]
        place: tuple[Product, Operand] = (product, "weight")
        operand = narrow.to(self.dtype)
        operand = operand if product == "output" else operand.mT
        key = self.low.same_amax.get(place, place)
        agreed: Agreed | None = amaxes[key] if key in amaxes else agreed_amax([operand], self.low, place)
        amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
        quantizer = copy.quantizer
        agree = to_agreed(None if agreed is None else agreed[0], quantizer)
        factor = self._factor(place, operand, site)
        found = quantize(operand, quantizer, ARRAYS, agree=agree, factor=factor)
        return [array for array in found if array is not None], amaxes

    def _factor(self, place: tuple[Product, Operand], operand: torch.Tensor, site: Site) -> torch.Tensor | None:
        """The factor of a weight with a delayed amax, or those of the experts that this rank has at rest, whose amaxes are raised;
        None of another one."""
        name = self.low.delayed.get(place)
        if name is None:
            return None
        own = slice(self.first_row, self.first_row + self.own_rows)
        if name in site.amaxes:
            amax, raised = amax_of(operand, self.low.quantizers[place], ARRAYS).flatten(), site.amaxes[name]
            raised = raised[own] if raised.dim() else raised.view(1)
            raised.copy_(torch.maximum(raised, amax[: len(raised)]))
        factor = site.factors[name]
        if not factor.dim():
            return factor
        return torch.cat([factor[own], factor.new_ones(self.rows - len(factor[own]))])

    def dims(self, number: int) -> list[int | None]:
        """The dim along which each array of a copy is gathered; None: every rank has all of it."""
        arrays = self.copies[number].arrays
        return [_gathered_dim(array) for array in arrays] if arrays else [0]

    def in_use(self, number: int, arrays: Sequence[torch.Tensor]) -> Gathered:
        """A copy without padding, in slices of what this rank multiplies with."""
        copy = self.copies[number]
        if copy.quantizer is None:
            return arrays[0][: self.gathered_rows].to(self.dtype)
        found = []
        for array, planned in zip(arrays, copy.arrays, strict=True):
            if (dim := _gathered_dim(planned)) is not None:
                array = array.narrow(dim, 0, ceil(self.gathered_rows / planned.per[dim]))
            steps = reshard_steps(planned.gathered, planned.in_use, (), self.ranks.mesh)
            found.append(redistribute(array, steps, tuple(planned.shape), self.ranks))
        return Quantized(*found, *[None] * (3 - len(found)))


def _gathered_dim(array: SentArray) -> int | None:
    names = list(array.shape)
    return next(
        (n for n, name in enumerate(names) if array.at_rest.axes_of(name) != array.gathered.axes_of(name)), None
    )
