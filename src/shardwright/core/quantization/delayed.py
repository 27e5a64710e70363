"""What a run keeps for delayed amaxes: a factor and a history for each tensor, the same on all devices that hold parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import DimSpec, Spec
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.quantization.reductions import AMAX_BYTES, distinct
from shardwright.core.recipes.recipe import History, Operand, Product
from shardwright.core.resolution.request import Request

DELAYED = "delayed."
FACTOR, HISTORY = f"{DELAYED}factor/", f"{DELAYED}history/"
"""Before the names of tensors in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScale:
    """A tensor of each layer, and of each expert, whose scale is of earlier steps. ``name``: of the first weight that multiplies it,
    with the operand: ``layers.mlp.gate.input``. ``spec`` and ``shape``: of its factors, layers stacked; a history has one
    more dim, the last. Every device keeps those of the experts that it computes."""

    name: str
    weight: QuantizedWeight
    operand: QuantizedOperand
    spec: Spec
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedTensor:
    """A tensor of the state, float32, by its name in a checkpoint. ``weight``: the first one that multiplies what it is about."""

    name: str
    weight: str
    spec: Spec
    shape: tuple[int, ...]
    first: float


def delayed_scales(request: Request, weights: Iterable[QuantizedWeight]) -> tuple[DelayedScale, ...]:
    """Each tensor with a delayed amax once, in the order of the weights and of a step's products."""
    return tuple(
        _scale(request, weight, operand) for weight, operand in distinct(weights) if operand.quantizer.amax == "delayed"
    )


def _scale(request: Request, weight: QuantizedWeight, operand: QuantizedOperand) -> DelayedScale:
    dims: list[tuple[DimSpec, int]] = []
    if weight.stack is not None:
        stages = request.layout.axes_with("stage", weight.component)
        dims.append((DimSpec("layers", stages), weight.num))
    if weight.experts is not None:
        dims.append((DimSpec("experts", weight.expert_axes), weight.experts))
    return DelayedScale(
        name=f"{weight.name}.{operand.operand}",
        weight=weight,
        operand=operand,
        spec=Spec(tuple(dim for dim, _ in dims)),
        shape=tuple(size for _, size in dims),
    )


def names_by_place(weight: QuantizedWeight, scales: Iterable[DelayedScale]) -> Mapping[tuple[Product, Operand], str]:
    """For the operands of a weight's products with a delayed amax, the names of their ``DelayedScale``."""
    by_amax = {one.operand.same_amax: one.name for one in scales}
    return {
        (one.product, one.operand): by_amax[one.same_amax] for one in weight.operands if one.quantizer.amax == "delayed"
    }


def delayed_tensors(rule: History | None, scales: Iterable[DelayedScale]) -> Iterator[DelayedTensor]:
    """The tensors that a run keeps between steps: the factors, then the histories."""
    if rule is None:
        return
    found = tuple(scales)
    for one in found:
        yield DelayedTensor(name=FACTOR + one.name, weight=one.weight.name, spec=one.spec, shape=one.shape, first=1.0)
    for one in found:
        dims = (*one.spec.dims, DimSpec("amax_history"))
        yield DelayedTensor(
            name=HISTORY + one.name,
            weight=one.weight.name,
            spec=Spec(dims),
            shape=(*one.shape, rule.amax_history_len),
            first=0.0,
        )


def history_bytes(request: Request, mesh: Mesh, weights: Iterable[QuantizedWeight]) -> int:
    """Bytes on a device of factors and histories: for each tensor a factor and ``amax_history_len`` amaxes."""
    rule = None if request.precision is None else request.precision.history
    scales = delayed_scales(request, weights)
    return sum(prod(_on_device(one, mesh)) * AMAX_BYTES for one in delayed_tensors(rule, scales))


def _on_device(one: DelayedTensor, mesh: Mesh) -> Iterator[int]:
    return (ceil(size / mesh.size(dim.axes)) for size, dim in zip(one.shape, one.spec.dims, strict=True))
