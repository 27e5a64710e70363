"""The tensors of a training step of MaxText's, as it tags them: a logical name for each dim, or none.

Weights are those of our model table; activations are the places where MaxText asks for a layout. Shapes are ours, and
each dim has our logical axis beside MaxText's name, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwright.core.capacity import row_capacity
from shardwright.core.errors import InputError
from shardwright.core.table import DTYPE_BYTES, ModelTable
from shardwright.interop.maxtext.sites import IN_MOE, SITES, WEIGHTS, MoePath, Site

CAPACITY_FACTOR = 1.25
"""What dispatched tokens are sized with where neither the file nor the model has a factor."""


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
    peel: bool = False
    """``moe_dispatch_no_expert_sharding``: dims of dispatched tokens are resolved alone, and ``expert`` taken off rows."""


def tensors_of(table: ModelTable, step: Step) -> tuple[Tagged, ...]:
    """Weights, then activations. Raises InputError for a model with a weight that MaxText has none like."""
    return (*_weights(table, step), *_activations(table, step))


def _weights(table: ModelTable, step: Step) -> Iterator[Tagged]:
    for weight in table.weights:
        part = weight.name_in_layer
        if part not in WEIGHTS:
            raise InputError(f"MaxText has no tensor like '{weight.name}' of {table.name}.")
        names, dims, shape = WEIGHTS[part], weight.logical_axes, weight.shape
        if weight.stack:
            # A pipeline calls its layers so, whatever stack they come from.
            stack = "layers" if step.pipelined else weight.stack
            names, dims, shape = (stack, *names), ("layers", *dims), (weight.num, *shape)
        yield Tagged(
            name=weight.name,
            kind="weight",
            component=weight.component,
            names=names,
            dims=dims,
            shape=shape,
            itemsize=DTYPE_BYTES[step.weight_dtype],
            ours=weight.name,
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
