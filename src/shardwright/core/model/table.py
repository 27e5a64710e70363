"""A model as the planner reads it: a table of weights, activations and moves between activations.

``models`` builds the tables of known model families, ``own_model`` that of a user's own program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from shardwright.core.findings.bounds import within
from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.model.names import NO_NAMES, TensorNames
from shardwright.core.model.training_only import TrainingOnly

Contraction = tuple[str, str]
"""A contracted dim, as a (component, logical axis) pair."""

EXPERT_TOKENS = ("batch", "groups", "slots")
"""The dims of the tokens that an expert's weights are multiplied with."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """How a weight is initialized: ``normal`` with a standard deviation (truncated at 3), ``ones`` or ``zeros``."""

    kind: Literal["normal", "ones", "zeros"]
    stddev: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(HashedOnce):
    """One parameter, or one row of the table for the same parameter of ``num`` layers.

    ``shape`` and ``logical_axes`` describe one layer. ``stack``: the consecutive layers that share the row
    (``layers``, ``moe_layers``), which an engine may store stacked; None for a weight that exists once.
    ``storage``: the logical axes that may be the storage dim, in the order in which they are tried; none: the weight
    is unsharded at rest.
    ``contracted``: the dims contracted in its gradient, as (component, logical axis) pairs.
    ``unit``: for a logical axis that counts elements, the number of elements of a unit that may not be split.
    ``torch_dims``: the dims as PyTorch stores them, each a tuple of logical axes merged major first.
    ``frozen``: not trained by gradients (the routing bias); saved all the same.
    ``hugging_face``: published name, with ``{layer}`` and ``{expert}`` for their numbers.
    ``first_layer``: number of the first of the ``num`` layers in the model. ``first_in_stack``: its number in the stack, as checkpoints
    count; 0 but in a stage of a pipeline, which has some layers of it.
    ``in_use_dtype``: its own dtype in use (the router's float32); None: the computation's.
    ``uses``: further components that use the same weight (tied embeddings: ``logits``).
    ``ends_layer``: its product is only an output of the layer, so recomputing the layer can omit it.
    ``tokens``: the dims of the tokens that it is multiplied with, except for experts (``EXPERT_TOKENS``).
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
    first_in_stack: int = 0
    dtype: str = "float32"
    unit: Mapping[str, int] | None = None
    torch_dims: tuple[tuple[str, ...], ...] | None = None
    frozen: bool = False
    hugging_face: str | None = None
    in_use_dtype: str | None = None
    uses: tuple[str, ...] = ()
    ends_layer: bool = False
    tokens: tuple[str, ...] = ("batch", "length")

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.name, self.component, self.shape, self.num, self.first_layer)

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.logical_axes), self.name

    def size(self, logical_axis: str) -> int:
        """Size of the named dim, in elements."""
        return self.shape[self.logical_axes.index(logical_axis)]

    def units_of(self, logical_axis: str) -> int:
        """The most shards of the named dim: its number of units."""
        return self.size(logical_axis) // (self.unit or {}).get(logical_axis, 1)

    @property
    def name_in_layer(self) -> str:
        """Its name in each layer of its stack; ``name`` if it exists once."""
        return name_in_layer(self.name, self.stack)

    @property
    def layers(self) -> range:
        """The numbers of its layers in the stack; of a weight that exists once, that of its only one."""
        return range(self.first_in_stack, self.first_in_stack + self.num)

    @property
    def num_parameters(self) -> int:
        """Elements of all ``num`` layers."""
        return prod(self.shape) * self.num


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(HashedOnce):
    """One named activation. Its shape is ``sizes`` of the table at its logical axes, and the request's batch and length."""

    name: str
    component: str
    logical_axes: tuple[str, ...]
    num: int = 1
    dtype: str | None = None
    """A dtype of its own; None: the computation's."""
    sizes: Mapping[str, int] | None = None
    """Sizes along logical axes that differ from the table's (hidden units of a shared expert)."""
    stacks: tuple[str, ...] = ()
    """The stacks whose layers have it; none: every layer's, or no layer's."""

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.name, self.component, self.num, self.logical_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(HashedOnce):
    """How the forward pass of a layer makes one of its activations, in the order of the layer.

    ``inputs``: the activations that it is made of. ``reads``: those that the backward pass through the operation reads. ``weights``:
    those that it multiplies tokens with, by their names in the layer. ``like``: the row of the table that has its dims, dtype and
    sharding, where the activation has no row of its own. ``stacks``: as of an activation.
    """

    output: str
    inputs: tuple[str, ...]
    reads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    like: str | None = None
    stacks: tuple[str, ...] = ()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.output, self.inputs, self.stacks)


MoveKind = Literal["stream", "queries", "keys", "dispatch", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(HashedOnce):
    """A resharding in the forward pass, from the spec of ``source`` to that of ``target``.

    ``summed``: the dims contracted in computing the source: it is partial over the axes that shard those.
    ``feeds``: the dims contracted in computing the target's cotangent: it is partial over the axes that shard those.
    ``renamed``: logical axes that change name in the move (``length`` becomes ``kv_length``).
    ``beside``: another part of the layer, by its input if this move's target is made of the same array, or by its output if
    this move's source is added to the same array.
    ``kind``: ``queries`` and ``keys`` obey ``move.attention``, ``dispatch`` and ``combine`` obey ``move.moe``.
    """

    source: str
    target: str
    summed: tuple[Contraction, ...] = ()
    feeds: tuple[Contraction, ...] = ()
    renamed: Mapping[str, str] | None = None
    kind: MoveKind = "stream"
    ends_layer: bool = False
    beside: str = ""

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.source, self.target)


Owner = Literal["ours", "users"]
"""Whose program a table describes: the engines', with all activations; or a user's own, with its weights and only
those activations whose sharding it asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable(HashedOnce):
    """A model as data.

    ``sizes``: elements along each logical axis of activations, except batch, length, groups and slots, which the
    request and the layout give; an activation's own ``sizes`` take precedence. ``top_k``: experts per token, None
    without experts. ``expert_groups``: the experts are in so many groups of neighbours, and those of a token are of ``chosen_groups`` of
    them. ``capacity_factor`` None: no token is dropped.
    ``attention_window``: how many tokens a token attends to; None: all before it in its document.
    ``operations``: how a layer makes its activations, so that it is known what can be kept and what is made again; none for a user's
    own program.
    ``dtype``: that of the computation unless the request gives another.
    ``names``: of its tensors, by what they are in its program.
    ``architecture``: what the engines need beyond shapes; None for a user's own program.
    ``training_only``: what its configuration says of training alone, and neither engine computes.

    Raises InputError for more layers or a longer dim than the bounds allow (``core/findings/bounds.py``).
    """

    family: str
    name: str
    sizes: Mapping[str, int]
    weights: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    moves: tuple[Move, ...]
    num_layers: int
    operations: tuple[Operation, ...] = ()
    dtype: str = "bfloat16"
    top_k: int | None = None
    expert_groups: int = 1
    chosen_groups: int = 1
    capacity_factor: float | None = None
    attention_window: int | None = None
    owner: Owner = "users"
    architecture: Any = None
    names: TensorNames = NO_NAMES
    natural_layout: str = "fsdp"
    natural_mesh: Mapping[str, int] | None = None
    natural_batch: int | None = None
    natural_length: int | None = None
    training_only: tuple[TrainingOnly, ...] = ()
    components: frozenset[str] = field(init=False, repr=False, compare=False)
    """Those that have a tensor in this model."""
    weights_by_name: Mapping[str, Weight] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both are read many thousand times in a plan.
        rows = (*self.weights, *self.activations)
        object.__setattr__(self, "components", frozenset(row.component for row in rows))
        object.__setattr__(self, "weights_by_name", {weight.name: weight for weight in self.weights})
        within(f"{self.name}: num_layers", self.num_layers, "layers")
        for weight in self.weights:
            within(f"{self.name}: the number of layers of '{weight.name}'", weight.num, "layers")
            for axis, size in zip(weight.logical_axes, weight.shape, strict=True):
                within(f"{self.name}: '{axis}' of '{weight.name}'", size, "elements")
        assert (self.owner == "ours") == (self.architecture is not None), self.name

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.name, self.num_layers, self.weights)

    @property
    def num_parameters(self) -> int:
        """Trained elements; a tied weight counts once, a frozen one not at all."""
        return sum(weight.num_parameters for weight in self.weights if not weight.frozen)

    def size(self, activation: Activation, logical_axis: str) -> int:
        """Elements of an activation along a logical axis; KeyError for an axis whose size the request gives."""
        return {**self.sizes, **(activation.sizes or {})}[logical_axis]

    def names_in(self, stack: str) -> Mapping[str, str]:
        """The name of each weight of a stack inside a layer, by its name in the table."""
        return {weight.name: weight.name_in_layer for weight in self.weights if weight.stack == stack}

    def weight(self, name: str) -> Weight:
        return self.weights_by_name[name]

    def activation(self, name: str) -> Activation:
        return next(activation for activation in self.activations if activation.name == name)


def name_in_layer(name: str, stack: str | None) -> str:
    """
    >>> name_in_layer("moe_layers.moe.up", "moe_layers"), name_in_layer("embedding.tokens", None)
    ('moe.up', 'embedding.tokens')
    """
    return name if stack is None else name.removeprefix(f"{stack}.")


@lru_cache(maxsize=4096)
def of_one_layer(weight: Weight) -> Weight:
    """A weight of one layer, the same for all parts of a model that have the row."""
    return _first_of_equal(replace(weight, num=1, first_layer=0, first_in_stack=0))


@lru_cache(maxsize=4096)
def _first_of_equal(weight: Weight) -> Weight:
    return weight


@lru_cache(maxsize=4096)
def as_torch_stores(weight: Weight) -> Weight:
    """The same weight with the dims that PyTorch stores: heads and head_dim are merged, outputs come first.

    A frozen weight without a storage dim is a buffer in PyTorch, which ``fully_shard`` leaves on every rank. A weight
    whose dim 0 may not be sharded is unsharded at rest too. Dims that are merged of several are stored on no axis but as dim 0.

    >>> w = Weight(name="q", component="attention", logical_axes=("embed", "heads", "head_dim"), shape=(64, 4, 16),
    ...            initializer=Initializer(kind="normal", stddev=0.1), contracted=(), storage=("embed",),
    ...            torch_dims=(("heads", "head_dim"), ("embed",)))
    >>> stored = as_torch_stores(w)
    >>> stored.logical_axes, stored.shape, stored.unit, stored.storage
    (('heads', 'embed'), (64, 64), {'heads': 16}, ('heads', 'embed'))
    """
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    assert sorted(name for dim in dims for name in dim) == sorted(weight.logical_axes), weight.name
    unit = {dim[0]: prod(weight.size(name) for name in dim[1:]) for dim in dims if len(dim) > 1}
    # A user's own weight may have no dim, or a first dim that may not be sharded.
    may_shard_at_rest = bool(dims) and not dims[0][0].startswith("_")
    return replace(
        weight,
        logical_axes=tuple(dim[0] for dim in dims),
        shape=tuple(prod(weight.size(name) for name in dim) for dim in dims),
        unit={**(weight.unit or {}), **unit} or None,
        storage=()
        if (weight.frozen and not weight.storage) or not may_shard_at_rest
        else (dims[0][0], *(dim[0] for dim in dims[1:] if len(dim) == 1 and not dim[0].startswith("_"))),
    )
