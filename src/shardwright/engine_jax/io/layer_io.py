"""The interface between the mathematics and the layout: all communication goes through ``Links``.

Each device runs a step on its local shards (``jax.shard_map`` over the entire mesh); on one device nothing is sent. ``move``
reshards a named activation of the table to the layout of the component that uses it. ``use`` takes a weight from rest into
use. The other fields give the axes of algorithms that communicate themselves (a ring, experts, a sharded vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.capacity import Traffic
from shardwright.core.plan.attention_kernels import UNPLANNED, ChosenKernel
from shardwright.core.plan.expert_kernels import ExpertKernel
from shardwright.core.plan.movement import ReshardStep
from shardwright.core.quantization.dispatch import AS_THEY_ARE, SentRows
from shardwright.core.quantization.elements import Elements
from shardwright.core.recipes.kernels import KernelName
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.core.resolution.token_hops import TokenHop


class Resting(NamedTuple):
    """A weight that rests as codes: of each of its copies codes, scales, and the second scale where there is one, in the order and the dtypes
    in which they are gathered (``core/quantization/links.py``)."""

    copies: tuple[tuple[Any, ...], ...]


class WithGradient(NamedTuple):
    """A weight at rest whose gradient has another shape or dtype than what rests. ``gradient``: zeros of the gradient's; only its
    cotangent is of interest."""

    values: jax.Array | Resting
    gradient: jax.Array


AtRest = jax.Array | WithGradient


def gradient_of(weight: AtRest) -> jax.Array:
    """The array whose cotangent is the weight's gradient."""
    return weight.gradient if isinstance(weight, WithGradient) else weight


def with_gradient(weight: AtRest, gradient: jax.Array) -> AtRest:
    """The weight with another array whose cotangent is its gradient."""
    return WithGradient(weight.values, gradient) if isinstance(weight, WithGradient) else gradient


Params = Mapping[str, Any]
"""Weights at rest by name: arrays, or ``WithGradient``."""
GATHERED = "gathered_weight"
"""The name under which recomputation keeps a weight that stays gathered."""
InUse = Mapping[str, Any]
"""Weights in use by name: arrays, or ``precision.coded.Coded`` where codes are gathered."""
UseTwice = Callable[[str, AtRest], tuple[jax.Array, jax.Array]]
"""``use_twice(name, weight)``: a tied weight, taken into use once for both its uses. Their gradients are summed in the dtype in
which devices sum theirs."""
Scatter = Callable[[str, jax.Array, Any], jax.Array]
"""``scatter(name, gradient, dtype)``: the gradient of a weight at rest, from that of the weight in use."""
Move = Callable[[str, str, jax.Array], jax.Array]
"""``move(source, target, array)``: the activation ``source``, resharded as ``target``; the table has a Move between them."""


class Use(Protocol):
    """``use(name, weight, component)``: the local shard in use of one layer of a weight, in the dtype of the computation.

    ``component`` names the second use of a tied weight; None: the weight's own component. ``high``: not as codes, in a layer that
    stays high. ``factor``: of a weight with a delayed amax; those of its experts on this device.
    """

    def __call__(
        self,
        name: str,
        weight: AtRest,
        component: str | None = None,
        *,
        high: bool = False,
        factor: jax.Array | None = None,
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring of devices along ``axes``, major first; each sends to the next one.

    ``numbers``: for each device of the ring, its index along the axes ``in_mesh_order``.
    """

    axes: tuple[str, ...]
    in_mesh_order: tuple[str, ...]
    numbers: tuple[int, ...]

    @classmethod
    def over(cls, mesh: Mesh, axes: tuple[str, ...]) -> Ring:
        return cls(axes=axes, in_mesh_order=mesh.in_mesh_order(axes), numbers=mesh.numbers(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLinks:
    """The axes over which attention communicates; all larger than one, major first.

    ``ring``: sends keys and values (or the latent); None: they are not sent in a ring. ``heads`` shard the query heads in
    attention, ``kv_heads`` the KV heads. Where ``kv_heads`` has fewer axes, KV heads are replicated over the others, and a
    device takes those of its query heads. ``kernel``: the algorithm. ``chunks``: a row is divided into this many equal chunks,
    and these are their positions in the text.
    """

    ring: Ring | None = None
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    kernel: ChosenKernel = UNPLANNED
    chunks: tuple[int, ...] = IN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRing:
    """Expert parallelism by a ring: the step that gathers all tokens on every device, and that which reduce-scatters its outputs."""

    gather: ReshardStep
    scatter: ReshardStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """How experts are sharded and tokens are sent to them; axes are larger than one, major first.

    ``axes`` shard the experts; none where the experts' weights are gathered instead. ``ring``: all tokens are gathered on all
    devices in a ring; None: each token is sent to its assigned experts only. ``row`` shards a row of tokens: it is divided into
    ``len(tiles)`` equal chunks over these devices, and ``tiles[i]`` is the position of the i-th chunk in the text. ``traffic``:
    what a device sends and may receive. ``hops``: the exchanges of tokens. ``buffer_rows``: rows of its buffer. ``products``: the algorithm of the grouped products.
    ``sent``: how what is sent to experts is quantized.
    """

    traffic: Traffic
    hops: tuple[TokenHop, ...]
    buffer_rows: int
    products: ExpertKernel

    axes: tuple[str, ...] = ()
    ring: TokenRing | None = None
    row: tuple[str, ...] = ()
    tiles: tuple[int, ...] = (0,)
    sent: SentRows = AS_THEY_ARE


class Site(NamedTuple):
    """Where in a run a product is: what changes from step to step, from microbatch to microbatch and from layer to layer.

    Numbers are from 0, int32 scalars, and those of products outside the layers are of ``layer`` -1; ``seed``: of the run, two words.
    ``factors``: by the names of the plan's delayed scales, that of the layer, or those of its experts on this device, float32. The
    cotangent of a factor is no derivative: it is the amax of the tensor in the step (``precision/delayed.py``).
    """

    seed: tuple[jax.Array | int, jax.Array | int] = (0, 0)
    step: jax.Array | int = 0
    microbatch: jax.Array | int = 0
    layer: jax.Array | int = -1
    factors: Mapping[str, jax.Array] = MappingProxyType({})


NO_SITE = Site()


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """How the operands of the three products with a weight are quantized; an operand without a quantizer is not.

    ``name``: of the weight. ``amax_axes``: the axes over which devices hold parts of what shares a scale of an operand.
    ``same_amax``: operands with an equal key have the same amaxes, which are reduced once; inputs of other weights too.
    ``num_layers``: the weight is quantized in so many first layers of its stack.
    ``delayed``: for operands with a delayed amax, the names of their factors. ``site``: where the product is.
    ``kernels``: of the products of two quantized operands on this device; one that is missing is ``float32``.
    ``elements``: of operands that are rounded stochastically, those that a device has.
    """

    quantizers: Mapping[tuple[Product, Operand], Quantizer]
    name: str = ""
    num_layers: int = 1
    amax_axes: Mapping[tuple[Product, Operand], tuple[str, ...]] = field(default_factory=dict)
    same_amax: Mapping[tuple[Product, Operand], tuple[str, ...]] = field(default_factory=dict)
    delayed: Mapping[tuple[Product, Operand], str] = field(default_factory=dict)
    kernels: Mapping[Product, KernelName] = field(default_factory=dict)
    site: Site = NO_SITE
    elements: Mapping[tuple[Product, Operand], Elements] = field(default_factory=dict)

    @property
    def factor(self) -> jax.Array | None:
        """That of the weight, where its amax is delayed."""
        return self.site.factors.get(f"{self.name}.weight")

    @property
    def own_site(self) -> Site:
        """The site with the factors of this weight's operands only."""
        return self.site._replace(factors={name: self.site.factors[name] for name in set(self.delayed.values())})


def _in_place(name: str, gradient: jax.Array, dtype: Any) -> jax.Array:
    del name
    return gradient.astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All that the mathematics knows of a layout.

    ``vocab``: by component, the axes that shard the vocabulary. ``entries``: of a vocabulary that is padded in memory, the
    number without padding; None where it is not. ``loss_chunks``: a device's tokens have their logits in this many chunks, one
    after the other. ``tied_once``: a tied embedding is taken into use once for both its uses. ``kept``: the weights of layers that
    stay gathered, with the dtype in which their gradients are summed. ``experts``: None where the model has none. ``low``: by its name, inside a
    layer that in the layer, each weight whose products are quantized.
    """

    move: Move
    use: Use
    use_twice: UseTwice
    scatter: Scatter = _in_place
    kept: Mapping[str, Any] = field(default_factory=dict)
    vocab: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entries: int | None = None
    loss_chunks: int = 1
    tied_once: bool = True
    attention: AttentionLinks = AttentionLinks()
    experts: ExpertLinks | None = None
    low: Mapping[str, LowPrecision] = field(default_factory=dict)


def index_of(axes: Sequence[str]) -> jax.Array | int:
    """The index of this device along the axes, major first; 0 without axes."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def size_of(axes: Sequence[str]) -> int:
    """The number of devices along all the axes."""
    return prod(jax.lax.axis_size(axis) for axis in axes)
