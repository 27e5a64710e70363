"""The interface between the mathematics and the layout: all communication goes through ``Links``.

Each rank runs a step on its local shards; on one device nothing is sent. ``move`` reshards a named activation of the table to
the layout of the component that uses it. ``use`` takes a gathered weight into use. The other fields give the ranks of
algorithms that communicate themselves (a ring, experts, a sharded vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from shardwright.core.quantization.dispatch import AS_THEY_ARE, SentRows
from shardwright.core.quantization.elements import Elements
from shardwright.core.recipes.kernels import KernelName
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_torch.io.mesh import Peers

Params = Mapping[str, torch.Tensor]
InUse = Mapping[str, Any]
"""Weights by name: tensors, or ``precision.coded.Coded`` where codes are gathered."""
Move = Callable[[str, str, torch.Tensor], torch.Tensor]
"""``move(source, target, array)``: the activation ``source``, resharded as ``target``; the table has a Move between them."""

HowMany = Callable[[torch.Tensor, int], list[int]]
"""``how_many(counts, total)``: counts of rows as Python integers, which are read from the device. ``total``: their sum if nothing
is dropped and all ranks have the same number. A dry run, where tensors have no values, divides it evenly instead."""


def as_counted(counts: torch.Tensor, total: int) -> list[int]:
    """The counts of the device; ``total`` is not used."""
    del total
    return counts.tolist()


Coordinates = Callable[[tuple[str, ...]], tuple[int, int]]
"""``here(axes)``: the index of this rank over some axes, major first, and how many ranks there are along them."""

ALONE = Peers(axes=(), size=1, index=0, group=None, order=(0,))


class Use(Protocol):
    """``use(name, weight)``: the local shard in use of a weight that is already gathered, as PyTorch stores it: outputs first.

    ``component`` names the second use of a tied weight; None: the weight's own component.
    """

    def __call__(self, name: str, weight: Any, component: str | None = None) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLinks:
    """The ranks over which attention communicates.

    ``ring``: sends keys and values (or the latent). ``heads`` shard the query heads in attention, ``kv_heads`` the KV heads.
    ``kv_replicas``: the ranks of ``heads`` over which KV heads are replicated; each takes those of its query heads.
    ``chunks``: a row is divided into this many equal chunks, and these are their positions in the text.
    """

    ring: Peers = ALONE
    heads: Peers = ALONE
    kv_heads: Peers = ALONE
    kv_replicas: Peers = ALONE
    chunks: tuple[int, ...] = IN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """How experts are sharded and tokens are sent to them.

    ``peers`` shard the experts; ``ALONE`` where the experts' weights are gathered instead. ``nodes``: those to which tokens are sent before,
    which shard the experts too; ``ALONE``: a token goes to its experts in one hop. ``even_tokens``: that a rank sends to nodes in an even
    routing, ``even_rows``: to experts from there; None: one for each assignment of its own. ``ring``: all tokens are gathered on
    all ranks in a ring; otherwise each token is sent to its assigned experts only. ``row`` shards a row of tokens: it is divided
    into ``len(tiles)`` equal chunks over these ranks, and ``tiles[i]`` is the position of the i-th chunk in the text.
    ``capacity``: tokens of a row that one expert takes at most; None: all. ``buffer_rows``: rows of a rank's buffer of tokens;
    None: as many as it receives. ``how_many``: see ``HowMany``. ``sent``: how what is sent to experts is quantized.
    """

    peers: Peers = ALONE
    nodes: Peers = ALONE
    even_tokens: int = 0
    even_rows: int | None = None
    ring: bool = False
    row: Peers = ALONE
    tiles: tuple[int, ...] = (0,)
    capacity: int | None = None
    buffer_rows: int | None = None
    how_many: HowMany = as_counted
    sent: SentRows = AS_THEY_ARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where in a run a product is: what changes from step to step, from microbatch to microbatch and from layer to layer.

    Numbers are from 0, and those of products outside the layers are of ``layer`` -1; ``seed``: of the run, a number below 2^64 or its two
    words, int32. ``passes``: where steps are not known, how many backward passes there were, int32: each takes that number as its
    ``step``, and adds one in place. ``factors``: by the names
    of the plan's delayed scales, that of the layer, or those of its experts on this rank, float32. ``amaxes``: those of the tensors
    in this step, int32 bits, of the same shapes; the products raise them in place. ``measured``: each product takes the factor of the
    elements that it has now instead, as factors of earlier steps are those of other tensors.
    """

    seed: int | torch.Tensor = 0
    step: int | torch.Tensor = 0
    microbatch: int = 0
    layer: int = -1
    passes: torch.Tensor | None = None
    factors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    amaxes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    measured: bool = False

    def of_next_pass(self) -> Site:
        """That of one backward pass."""
        if self.passes is None:
            return self
        number = self.passes.clone()
        self.passes.add_(1)
        return replace(self, step=number)


NO_SITE = Site()


def _alone(axes: tuple[str, ...]) -> tuple[int, int]:
    assert not axes, axes
    return 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """How the operands of the three products with a weight are quantized; an operand without a quantizer is not.

    ``name`` and ``component``: of the weight. ``amax_peers``: the ranks that hold parts of what shares a scale of an operand.
    ``same_amax``: operands with an equal key have the same amaxes, which are reduced once; inputs of other weights too.
    ``num_layers``: the weight is quantized in so many first layers of its stack.
    ``delayed``: for operands with a delayed amax, the names of their factors. ``site``: where the product is. ``kernels``: of the
    products of two quantized operands on this rank; one that is missing is ``float32``. ``split``: the backward pass is made in
    halves, of which the first makes the input's gradient and the second the weight's.
    """

    quantizers: Mapping[tuple[Product, Operand], Quantizer]
    kernels: Mapping[Product, KernelName] = field(default_factory=dict)
    name: str = ""
    num_layers: int = 1
    component: str = ""
    amax_peers: Mapping[tuple[Product, Operand], Peers] = field(default_factory=dict)
    same_amax: Mapping[tuple[Product, Operand], tuple[str, ...]] = field(default_factory=dict)
    delayed: Mapping[tuple[Product, Operand], str] = field(default_factory=dict)
    site: Site = NO_SITE
    elements: Mapping[tuple[Product, Operand], Elements] = field(default_factory=dict)
    here: Coordinates = _alone
    split: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All that the mathematics knows of a layout. ``dtype``: of the computation. ``vocab``: by component, the ranks that shard the vocabulary. ``entries``: of a
    vocabulary that is padded in memory, the number without padding; None where it is not. ``loss_chunks``: a rank's tokens have
    their logits in this many chunks, one after the other. ``low``: by its name, inside a layer that in the layer, each weight whose
    products are quantized. ``split``: the backward pass is made in halves (``halves_wanted``)."""

    move: Move
    use: Use
    dtype: torch.dtype
    vocab: Mapping[str, Peers] = field(default_factory=dict)
    entries: int | None = None
    loss_chunks: int = 1
    attention: AttentionLinks = AttentionLinks()
    experts: ExpertLinks = ExpertLinks()
    low: Mapping[str, LowPrecision] = field(default_factory=dict)
    split: bool = False


def halves_wanted(ctx: Any, *, split: bool) -> tuple[bool, bool]:
    """Whether a backward pass of an autograd function makes the gradients of the input and of the weight. ``split``: it is
    called twice, for which autograd asks without saying so: first for the input's, then for the weight's."""
    if not split:
        return True, True
    ctx.in_first_half = not getattr(ctx, "in_first_half", False)
    return ctx.in_first_half, not ctx.in_first_half
