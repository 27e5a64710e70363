"""What a model is to the planner: a table of weights, activations and the moves between them.

``models`` builds such tables for the families we know, ``own_model`` for a user's own program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from shardwright.core.findings.bounds import within

Contraction = tuple[str, str]
"""A (component, logical axis) pair that is summed over."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """How a weight starts: ``normal`` with a standard deviation (cut off at 3), ``ones`` or ``zeros``."""

    kind: Literal["normal", "ones", "zeros"]
    stddev: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter, or one row of parameters that ``num`` layers share.

    ``shape`` and ``logical_axes`` describe one layer. ``stack``: the layers that follow each other and share the row
    (``layers``, ``moe_layers``), which an engine may keep together; None for a weight that exists once.
    ``storage``: the logical axes that may carry the cut at rest, in the order in which they are tried; none:
    the weight rests whole.
    ``contracted``: what is summed over in making its gradient, as (component, logical axis) pairs.
    ``unit``: for a logical axis that counts elements, how many make one unit that may not be split.
    ``torch_dims``: the dims as PyTorch stores them, each a tuple of logical axes merged major first.
    ``frozen``: not trained by gradients (the routing bias); saved all the same.
    ``hugging_face``: published name, with ``{layer}`` and ``{expert}`` where they count.
    ``first_layer``: number of the first of the ``num`` layers in the whole model.
    ``in_use_dtype``: a dtype of its own in use (the router's float32); None: the computation's.
    ``uses``: further components that use the same weight (tied embeddings: ``logits``).
    ``ends_layer``: its product only leaves the layer, so that a recomputation of the layer need not make it.
    """

    name: str
    component: str
    logical_axes: tuple[str, ...]
    shape: tuple[int, ...]
    initializer: Initializer
    contracted: tuple[Contraction, ...]
    storage: tuple[str, ...] = ()
    num: int = 1
    stack: str | None = None
    first_layer: int = 0
    dtype: str = "float32"
    unit: Mapping[str, int] | None = None
    torch_dims: tuple[tuple[str, ...], ...] | None = None
    frozen: bool = False
    hugging_face: str | None = None
    in_use_dtype: str | None = None
    uses: tuple[str, ...] = ()
    ends_layer: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.logical_axes), self.name

    def size(self, logical_axis: str) -> int:
        """Size of the named dim, in elements."""
        return self.shape[self.logical_axes.index(logical_axis)]

    def units_of(self, logical_axis: str) -> int:
        """How many pieces the named dim may be cut into at most."""
        return self.size(logical_axis) // (self.unit or {}).get(logical_axis, 1)

    @property
    def name_in_layer(self) -> str:
        """The name that it has in each layer of its stack; its own where it exists once."""
        return name_in_layer(self.name, self.stack)

    @property
    def num_parameters(self) -> int:
        """Elements of all ``num`` layers together."""
        return prod(self.shape) * self.num


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One named activation. Its shape is ``sizes`` of the table at its logical axes, and the request's batch and length."""

    name: str
    component: str
    logical_axes: tuple[str, ...]
    num: int = 1
    dtype: str | None = None
    """A dtype of its own; None: the computation's."""
    sizes: Mapping[str, int] | None = None
    """Elements along logical axes where they differ from the table's (hidden units of a shared expert)."""
    stacks: tuple[str, ...] = ()
    """The stacks whose layers have it; none: every layer's, or no layer's."""


MoveKind = Literal["stream", "queries", "keys", "dispatch", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A step of the forward pass at which a tensor changes owner: from ``source``'s layout to ``target``'s.

    ``summed``: what was contracted in making the source: it is partial over the axes that cut those.
    ``feeds``: what the target is contracted with next: its gradient is partial over the axes that cut those.
    ``renamed``: logical axes that change name on the way (``length`` becomes ``kv_length``).
    ``kind``: ``queries`` and ``keys`` obey ``move.attention``, ``dispatch`` and ``combine`` obey ``move.moe``.
    """

    source: str
    target: str
    summed: tuple[Contraction, ...] = ()
    feeds: tuple[Contraction, ...] = ()
    renamed: Mapping[str, str] | None = None
    kind: MoveKind = "stream"
    ends_layer: bool = False


Program = Literal["ours", "users"]
"""Whose mathematics a table is for: that of the engines, which lists all activations, or that of a user's own program,
which lists weights, and of activations those alone whose layout is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """A model as data.

    ``sizes``: elements along each logical axis of activations, but for batch, length, groups and slots, which
    the request and the layout give; an activation's own ``sizes`` come first. ``top_k`` experts per token, None
    without experts; ``capacity_factor`` None: no token is dropped.
    ``dtype``: what its computation runs in unless the request says otherwise.
    ``architecture``: what the mathematics of ``program`` needs beyond shapes; None where it is the user's.

    Raises InputError for more layers or a longer dim than are taken (``core/findings/bounds.py``).
    """

    family: str
    name: str
    sizes: Mapping[str, int]
    weights: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    moves: tuple[Move, ...]
    num_layers: int
    dtype: str = "bfloat16"
    top_k: int | None = None
    capacity_factor: float | None = None
    program: Program = "users"
    architecture: Any = None
    natural_layout: str = "fsdp"
    natural_mesh: Mapping[str, int] | None = None
    natural_batch: int | None = None
    natural_length: int | None = None

    def __post_init__(self) -> None:
        within(f"{self.name}: num_layers", self.num_layers, "layers")
        for weight in self.weights:
            within(f"{self.name}: the number of layers of '{weight.name}'", weight.num, "layers")
            for axis, size in zip(weight.logical_axes, weight.shape, strict=True):
                within(f"{self.name}: '{axis}' of '{weight.name}'", size, "elements")
        assert (self.program == "ours") == (self.architecture is not None), self.name

    @property
    def num_parameters(self) -> int:
        """Trained elements; a tied weight counts once, a frozen one not at all."""
        return sum(weight.num_parameters for weight in self.weights if not weight.frozen)

    @property
    def components(self) -> frozenset[str]:
        """The components that have a tensor in this model."""
        return frozenset(row.component for row in (*self.weights, *self.activations))

    def size(self, activation: Activation, logical_axis: str) -> int:
        """Elements of an activation along a logical axis that the model gives (KeyError: the request gives it)."""
        return {**self.sizes, **(activation.sizes or {})}[logical_axis]

    def names_in(self, stack: str) -> Mapping[str, str]:
        """The names that the weights of a stack have in each of its layers, by the table's."""
        return {weight.name: weight.name_in_layer for weight in self.weights if weight.stack == stack}

    def weight(self, name: str) -> Weight:
        return next(weight for weight in self.weights if weight.name == name)

    def activation(self, name: str) -> Activation:
        return next(activation for activation in self.activations if activation.name == name)


def name_in_layer(name: str, stack: str | None) -> str:
    """
    >>> name_in_layer("moe_layers.moe.up", "moe_layers"), name_in_layer("embedding.tokens", None)
    ('moe.up', 'embedding.tokens')
    """
    return name if stack is None else name.removeprefix(f"{stack}.")


def as_torch_stores(weight: Weight) -> Weight:
    """The same weight with the dims that PyTorch stores: heads and head_dim are one dim, outputs come first.

    A frozen weight that rests whole is a buffer there, which ``fully_shard`` leaves on every rank. A weight without a dim
    0 that may be cut rests whole too.

    >>> w = Weight(name="q", component="attention", logical_axes=("embed", "heads", "head_dim"), shape=(64, 4, 16),
    ...            initializer=Initializer(kind="normal", stddev=0.1), contracted=(), storage=("embed",),
    ...            torch_dims=(("heads", "head_dim"), ("embed",)))
    >>> stored = as_torch_stores(w)
    >>> stored.logical_axes, stored.shape, stored.unit, stored.storage
    (('heads', 'embed'), (64, 64), {'heads': 16}, ('heads',))
    """
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    assert sorted(name for dim in dims for name in dim) == sorted(weight.logical_axes), weight.name
    unit = {dim[0]: prod(weight.size(name) for name in dim[1:]) for dim in dims if len(dim) > 1}
    # A user's own weight may have no dim, or one in front that nothing may cut.
    may_shard_at_rest = bool(dims) and not dims[0][0].startswith("_")
    return replace(
        weight,
        logical_axes=tuple(dim[0] for dim in dims),
        shape=tuple(prod(weight.size(name) for name in dim) for dim in dims),
        unit={**(weight.unit or {}), **unit} or None,
        storage=() if (weight.frozen and not weight.storage) or not may_shard_at_rest else (dims[0][0],),
    )
