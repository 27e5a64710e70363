"""The properties in which engines differ. docs/engines.md is their table, with the values of each engine.

Each says a behaviour from which the core decides something, and that an engine to come may share with one and not with the other. So no
property is an engine's name, and none says what its engine has in common with all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProductLibrary = Literal["xla", "aten"]
"""Whose products of quantized operands an engine calls (``core/recipes/kernels.py``)."""

Lack = Literal[
    "codes at rest in stages",
    "codes at rest on all devices",
    "dtypes of gradients in stages",
    "gradients wider than gathered weights",
    "gradients scattered in stages",
    "kept weights in stages",
    "kept weights of own programs",
    "own programs in stages",
    "parts of policies in stages",
    "weights stored on several dims",
]
"""What an engine may not run yet. A plan of it is refused by name (SW415)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProperties:
    """What the core knows of an engine.

    Of the engine

    ``title``: its name in a sentence. ``framework``: whose arrays it has. ``accelerators``: the kinds of chips that it trains on.
    ``schedules``: those of pipelines that it runs. ``product_library``: whose products of quantized operands it calls. ``lacks``: what it
    does not run yet. ``trains_own_programs``: of a user's own program it gathers the weights and reduces the gradients; otherwise it only
    places them.

    Of its program

    ``one_program``: all devices run one program, also in a pipeline. So arrays are equally large on all of them, every device has what is
    outside the layers, stages are branches, and a weight of a stage is there for all microbatches. Otherwise a rank has its own stages.
    ``compiled``: the step is compiled, and not dispatched operation by operation.
    ``joins_equal_results``: two equal results of a layer are made once: one array that is resharded in one way, one amax.
    ``repeats_in_order``: a layer that keeps nothing is repeated as it is, up to the last result that its backward pass needs. Otherwise
    only what is needed is made again.
    ``static_rows``: buffers for the rows of experts have a fixed size. Rows of no expert have an amax too, and pass through memory.

    Of its weights

    ``merges_dims``: dims are merged as their module stores them, outputs first; otherwise they are those of the table.
    ``outputs_first``: a user's own matrix is (outputs, inputs); otherwise (inputs, outputs).
    ``divides_by_heads``: fused weights of a user's own program of which each device gets the rows of its own heads.
    ``stacks_layers``: the layers of a stack are one array; otherwise each is a parameter of its own.
    ``uneven_shards``: dim 0 may be stored in shards of different sizes; otherwise a dim must divide, or is padded.
    ``updates_any_dim``: an update may be sharded on any dim of a weight; otherwise on those of its storage list.
    ``updates_in_place``: what a device has not updated itself is gathered into the weights, layer by layer; otherwise the new weights of
    all layers are there before they take the place of the old ones.

    Of its gathers

    ``gathers_together``: one collective gathers the weights of a group, through a buffer; otherwise each weight is gathered alone.
    ``gathers_once``: a tied weight is gathered once for both of its uses, which must have the same specs; otherwise for each use.
    ``gathers_frozen``: weights that are not trained may be stored in another way than they are used.
    ``gathers_by_schedule``: when a stage gathers its weights follows from its schedule; otherwise the layout says it (``keep_gathered``).
    ``reduces_over_gathered``: gradients are reduced over all axes over which the weight was gathered, also where all devices have the same.
    ``reduces_replicas_early``: the sum over replicas runs beside the backward pass of the last microbatch; otherwise after it.
    ``sends_scales_with_codes``: tokens' codes and scales are the bytes of one collective; otherwise each has its own.

    Of its memory

    ``frees_eagerly``: an array goes when autograd has no more use for it. Otherwise a compiler plans the buffers of the entire step.
    ``returns_copies_beside``: what was put on the host comes back beside the recomputation and the backward pass; otherwise they wait.
    ``keeps_ring_keys``: attention in a ring keeps the keys and values of every step; otherwise they are sent around again.
    ``scores_at_once``: the scores of short rows are computed at once, and again in the backward pass; otherwise a kernel never has them all.
    ``masks_attention``: kernels of attention read a mask of queries and keys, which is kept once for all layers.
    """

    title: str
    framework: str
    accelerators: frozenset[str]
    schedules: tuple[str, ...]
    product_library: ProductLibrary
    lacks: frozenset[Lack]
    trains_own_programs: bool

    one_program: bool
    compiled: bool
    joins_equal_results: bool
    repeats_in_order: bool
    static_rows: bool

    merges_dims: bool
    outputs_first: bool
    divides_by_heads: frozenset[str]
    stacks_layers: bool
    uneven_shards: bool
    updates_any_dim: bool
    updates_in_place: bool

    gathers_together: bool
    gathers_once: bool
    gathers_frozen: bool
    gathers_by_schedule: bool
    reduces_over_gathered: bool
    reduces_replicas_early: bool
    sends_scales_with_codes: bool

    frees_eagerly: bool
    returns_copies_beside: bool
    keeps_ring_keys: bool
    scores_at_once: bool
    masks_attention: bool
