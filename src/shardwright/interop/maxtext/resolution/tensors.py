"""The tensors of a MaxText training step, as it annotates them: a logical name for each dim, or none.

Weights are those of our model table; activations are those that MaxText constrains. Shapes are ours. Each dim has our logical
axis and MaxText's name, so that both placements can be compared.
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
    ANNOTATIONS,
    EXPERT_NAMES,
    IN_MOE,
    WEIGHTS,
    WITH_SHARED_EXPERTS,
    Annotation,
    ExpertNames,
    MoePath,
)

CAPACITY_FACTOR = 1.25
"""The capacity factor of dispatched tokens where neither the file nor the model sets one."""


PIPELINED = ("layers", "moe_layers")
"""The stacks that a pipeline divides into stages; DeepSeek's dense layers are outside of it, on every stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedTensor:
    """A tensor with its logical names. ``num``: number of layers that have it; a weight has them as a dim.

    ``alone``: each of its dims is resolved alone, and then this axis is removed from this dim.
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
        """Bytes of all layers, unsharded."""
        return prod(self.shape) * self.num * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the shapes of a step depend on in addition to the model. ``path`` None: no source sets the MoE path."""

    batch: int
    length: int
    weight_dtype: str = "float32"
    dtype: str = "bfloat16"
    path: MoePath | None = None
    capacity_factor: float | None = None
    pipelined: bool = False
    pipeline_layers: int | None = None
    """``pipeline_parallel_layers``: the number of layers in the pipeline; None: all that can be."""
    scanned: bool = True
    """``scan_layers``: equal layers are one stacked array. Otherwise each layer has its own array."""
    decodes_in_parallel: bool = False
    """An axis ``context_autoregressive`` above 1: attention projections then have no names."""
    expert_names: ExpertNames | None = None
    """The setting that gives dims of the experts' weights other names."""
    peel: bool = False
    """``moe_dispatch_no_expert_sharding``: dims of dispatched tokens are resolved alone, and ``expert`` is removed from rows."""


def tensors_of(table: ModelTable, step: StepShape) -> tuple[AnnotatedTensor, ...]:
    """Weights, then activations. Raises InputError for a model with a weight that MaxText lacks."""
    return (*_weights(table, step), *_activations(table, step))


def _weights(table: ModelTable, step: StepShape) -> Iterator[AnnotatedTensor]:
    own = {**WEIGHTS, **(EXPERT_NAMES[step.expert_names] if step.expert_names else {})}
    if step.decodes_in_parallel:
        nameless = (
            ("attention.o",)
            if "kv_lora" in table.sizes
            else ("attention.q", "attention.k", "attention.v", "attention.o")
        )
        own.update(dict.fromkeys(nameless, (None, None, None)))
    for weight in table.weights:
        stack, name = weight.stack, weight.name_in_layer
        if name not in own:
            raise InputError(f"MaxText has no tensor like '{weight.name}' of {table.name}.")
        names = WITH_SHARED_EXPERTS.get(name, own[name]) if table.family == "deepseek3" else own[name]
        annotated = AnnotatedTensor(
            name=weight.name,
            kind="weight",
            component=weight.component,
            names=names,
            dims=weight.logical_axes,
            shape=weight.shape,
            itemsize=DTYPE_BYTES[step.weight_dtype],
            ours=weight.name,
        )
        yield from (annotated,) if stack is None else _stacked(annotated, stack, weight.num, step)


def _stacked(annotated: AnnotatedTensor, stack: str, num: int, step: StepShape) -> Iterator[AnnotatedTensor]:
    """The same weight of all layers of a stack: one array, or two where some layers are outside of the pipeline."""
    inside = min(num, step.pipeline_layers or num) if step.pipelined and stack in PIPELINED else 0
    if inside:
        # In a pipeline the stacked dim has this name for layers of any stack.
        yield _array(annotated, "layers", inside)
    if num > inside:
        outside = _array(annotated, stack if step.scanned else None, num - inside)
        yield replace(outside, name=f"{annotated.name} (outside)", ours=None) if inside else outside


def _array(annotated: AnnotatedTensor, stack: str | None, num: int) -> AnnotatedTensor:
    return replace(
        annotated,
        names=(stack, *annotated.names),
        dims=("layers", *annotated.dims),
        shape=(num, *annotated.shape),
    )


def _activations(table: ModelTable, step: StepShape) -> Iterator[AnnotatedTensor]:
    attention = "latent" if "kv_lora" in table.sizes else "grouped"
    factor = step.capacity_factor or table.capacity_factor or CAPACITY_FACTOR
    sizes = {**table.sizes, "batch": step.batch, **dict.fromkeys(("length", "kv_length"), step.length)}
    sizes["tokens"] = step.batch * step.length
    if table.top_k is not None:
        capacity = row_capacity(factor, top_k=table.top_k, experts=sizes["experts"], length=step.length)
        sizes["slots"] = capacity or step.length
    for annotation in ANNOTATIONS:
        if annotation.attention not in (None, attention) or (annotation.path is not None and table.top_k is None):
            continue
        if annotation.path is not None and annotation.path not in (step.path or ("capacity", "sparse")):
            continue
        row = next((a for a in table.activations if a.name == (annotation.ours or annotation.name)), None)
        if row is None and annotation.ours is not None:
            continue
        own = {**sizes, **((row.sizes or {}) if row else {})}
        num = row.num if row else _layers(table, annotation)
        yield AnnotatedTensor(
            name=annotation.name,
            kind="activation",
            component=row.component if row else annotation.name.partition(".")[0],
            names=annotation.names,
            dims=annotation.dims,
            shape=tuple(own[dim] for dim in annotation.dims),
            num=num,
            itemsize=DTYPE_BYTES[(row.dtype if row and row.dtype else step.dtype)],
            ours=annotation.ours,
            path=annotation.path,
            keys=annotation.keys,
            alone=("expert", 1) if step.peel and annotation.names[:2] == IN_MOE[:2] else None,
        )


def _layers(table: ModelTable, annotation: Annotation) -> int:
    if annotation.name.startswith("logits"):
        return 1
    similar = "moe.dispatched" if annotation.path else "attention.projected"
    return next((a.num for a in table.activations if a.name == similar), table.num_layers)
