"""The tensors of a training step of MaxText's, as it tags them: a logical name for each dim, or none.

Weights are those of our model table; activations are the places where MaxText asks for a layout. Shapes are ours, and
each dim has our logical axis beside MaxText's name, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from shardwright.core.findings.errors import InputError
from shardwright.core.model.capacity import row_capacity
from shardwright.core.model.table import DTYPE_BYTES, ModelTable
from shardwright.interop.maxtext.resolution.annotations import (
    EXPERT_NAMES,
    IN_MOE,
    SITES,
    WEIGHTS,
    WITH_SHARED_EXPERTS,
    ExpertNames,
    MoePath,
    Site,
)

CAPACITY_FACTOR = 1.25
"""What dispatched tokens are sized with where neither the file nor the model has a factor."""


PIPELINED = ("layers", "moe_layers")
"""The stacks that a pipeline cuts; DeepSeek's dense layers stay outside of it, on every stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A tensor with the names that it carries. ``num``: layers that have one like it; a weight's are a dim of it.

    ``alone``: each of its dims is resolved by itself, and this axis is then taken off this dim.
    """

    name: str
    kind: Literal["weight", "activation"]
    component: str
    names: tuple[str | None, ...]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    num: int = 1
    itemsize: int = 4
    ours: str | None = None
    path: MoePath | None = None
    keys: bool = False
    alone: tuple[str, int] | None = None

    @property
    def bytes(self) -> int:
        """Of all layers together, whole."""
        return prod(self.shape) * self.num * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the shapes of a step depend on beside the model. ``path`` None: no source says which way experts get tokens."""

    batch: int
    length: int
    weight_dtype: str = "float32"
    dtype: str = "bfloat16"
    path: MoePath | None = None
    capacity_factor: float | None = None
    pipelined: bool = False
    pipeline_layers: int | None = None
    """``pipeline_parallel_layers``: how many layers are in the pipeline; None: all that can be."""
    scanned: bool = True
    """``scan_layers``: layers alike are one array, with a dim for them. Else each is an array of its own."""
    decodes_in_parallel: bool = False
    """An axis ``context_autoregressive`` above 1: projections of attention carry no names then."""
    expert_names: ExpertNames | None = None
    """The setting that gives dims of the experts' weights other names."""
    peel: bool = False
    """``moe_dispatch_no_expert_sharding``: dims of dispatched tokens are resolved alone, and ``expert`` taken off rows."""


def tensors_of(table: ModelTable, step: Step) -> tuple[Tagged, ...]:
    """Weights, then activations. Raises InputError for a model with a weight that MaxText has none like."""
    return (*_weights(table, step), *_activations(table, step))


def _weights(table: ModelTable, step: Step) -> Iterator[Tagged]:
    own = {**WEIGHTS, **(EXPERT_NAMES[step.expert_names] if step.expert_names else {})}
    if step.decodes_in_parallel:
        nameless = (
            ("attention.o",)
            if "kv_lora" in table.sizes
            else ("attention.q", "attention.k", "attention.v", "attention.o")
        )
        own.update(dict.fromkeys(nameless, (None, None, None)))
    for weight in table.weights:
        stack, part = weight.stack, weight.name_in_layer
        if part not in own:
            raise InputError(f"MaxText has no tensor like '{weight.name}' of {table.name}.")
        names = WITH_SHARED_EXPERTS.get(part, own[part]) if table.family == "deepseek3" else own[part]
        tagged = Tagged(
            name=weight.name,
            kind="weight",
            component=weight.component,
            names=names,
            dims=weight.logical_axes,
            shape=weight.shape,
            itemsize=DTYPE_BYTES[step.weight_dtype],
            ours=weight.name,
        )
        yield from (tagged,) if stack is None else _stacked(tagged, stack, weight.num, step)


def _stacked(tagged: Tagged, stack: str, num: int, step: Step) -> Iterator[Tagged]:
    """The same weight of all layers of a stack: one array, or two where a part of the layers is outside of the pipeline."""
    inside = min(num, step.pipeline_layers or num) if step.pipelined and stack in PIPELINED else 0
    if inside:
        # A pipeline calls its layers so, whatever stack they come from.
        yield _array(tagged, "layers", inside)
    if num > inside:
        outside = _array(tagged, stack if step.scanned else None, num - inside)
        yield replace(outside, name=f"{tagged.name} (outside)", ours=None) if inside else outside


def _array(tagged: Tagged, stack: str | None, num: int) -> Tagged:
    return replace(
        tagged,
        names=(stack, *tagged.names),
        dims=("layers", *tagged.dims),
        shape=(num, *tagged.shape),
    )


def _activations(table: ModelTable, step: Step) -> Iterator[Tagged]:
    attention = "latent" if "kv_lora" in table.sizes else "grouped"
    factor = step.capacity_factor or table.capacity_factor or CAPACITY_FACTOR
    sizes = {**table.sizes, "batch": step.batch, **dict.fromkeys(("length", "kv_length"), step.length)}
    sizes["tokens"] = step.batch * step.length
    if table.top_k is not None:
        capacity = row_capacity(factor, top_k=table.top_k, experts=sizes["experts"], length=step.length)
        sizes["slots"] = capacity or step.length
    for site in SITES:
        if site.attention not in (None, attention) or (site.path is not None and table.top_k is None):
            continue
        if site.path is not None and site.path not in (step.path or ("capacity", "sparse")):
            continue
        row = next((a for a in table.activations if a.name == (site.ours or site.name)), None)
        if row is None and site.ours is not None:
            continue
        own = {**sizes, **((row.sizes or {}) if row else {})}
        num = row.num if row else _layers(table, site)
        yield Tagged(
            name=site.name,
            kind="activation",
            component=row.component if row else site.name.partition(".")[0],
            names=site.names,
            dims=site.dims,
            shape=tuple(own[dim] for dim in site.dims),
            num=num,
            itemsize=DTYPE_BYTES[(row.dtype if row and row.dtype else step.dtype)],
            ours=site.ours,
            path=site.path,
            keys=site.keys,
            alone=("expert", 1) if step.peel and site.names[:2] == IN_MOE[:2] else None,
        )


def _layers(table: ModelTable, site: Site) -> int:
    if site.name.startswith("logits"):
        return 1
    alike = "moe.dispatched" if site.path else "attention.projected"
    return next((a.num for a in table.activations if a.name == alike), table.num_layers)
