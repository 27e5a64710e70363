"""The reductions of amaxes in a step.

| amax | reduced |
|---|---|
| current, of what the forward pass multiplies | where it is quantized: in the forward pass and in the recomputation, in each microbatch |
| current, of what only the backward pass multiplies | in the backward pass, in each microbatch |
| current, of a weight that rests as codes | once a step; on JAX those of all its layers together |
| delayed | once a step, all of them that have the same axes together; over microbatches each device takes the largest |

Each is an all-reduce (maximum) of 4 bytes for each amax: the bits of a float32. Operands that are the same tensor with the same
amaxes share it, in the three products and of several weights that have one input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import EXPERT_TOKENS
from shardwright.core.policies.repeated import share_again
from shardwright.core.policies.runs import runs_of
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.recipes.recipe import Operand
from shardwright.core.resolution.request import Request

AMAX_BYTES, AMAX_DTYPE = 4, "int32"
"""Of an amax as it is sent: the bits of a float32 as an integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxReduction:
    """An all-reduce of ``values`` amaxes over ``axes``, ``times`` in a step. ``operand``: whose they are; None: of several."""

    component: str
    phase: Literal["forward", "recompute", "backward", "update"]
    axes: tuple[str, ...]
    values: int
    times: int
    weights: tuple[str, ...]
    operand: Operand | None = None


def amax_reductions(request: Request, mesh: Mesh, weights: Iterable[QuantizedWeight]) -> Iterator[AmaxReduction]:
    """Every reduction of amaxes in a step, tensor by tensor; of delayed amaxes one for each set of axes."""
    delayed: dict[tuple[str, ...], list[tuple[QuantizedWeight, int]]] = {}
    for weight, operand in distinct(weights):
        layers = layers_on_device(request, mesh, weight)
        if operand.values and operand.quantizer.amax == "delayed":
            delayed.setdefault(operand.reduced, []).append((weight, operand.values * layers))
        if not operand.values or operand.quantizer.amax == "delayed":
            continue
        if weight.rests and operand.operand == "weight":
            together = request.properties.stacks_layers
            yield AmaxReduction(
                component=weight.component,
                phase="update",
                axes=operand.reduced,
                values=operand.values * (layers if together else 1),
                times=1 if together else layers,
                weights=(weight.name,),
                operand=operand.operand,
            )
            continue
        # Those of all experts of a device together, and of a fixed buffer's rows of no expert.
        of_none = operand.values // operand.experts if request.properties.static_rows and _of_experts(operand) else 0
        for phase in ("backward",) if operand.product != "output" else _forward(request, weight, operand):
            yield AmaxReduction(
                component=weight.component,
                phase=phase,
                axes=operand.reduced,
                values=operand.values + of_none,
                times=layers * request.microbatches * operand.shards,
                weights=(weight.name,),
                operand=operand.operand,
            )
    for axes, values in delayed.items():
        yield AmaxReduction(
            component=values[0][0].component,
            phase="update",
            axes=axes,
            values=sum(number for _, number in values),
            times=1,
            weights=tuple(dict.fromkeys(weight.name for weight, _ in values)),
        )


def _of_experts(operand: QuantizedOperand) -> bool:
    """Whether an amax is that of all tokens of an expert."""
    tokens = operand.dims.get("tokens")
    entire = operand.quantizer.of_tensor or operand.extents.get("tokens", 1) is None
    return entire and tokens is not None and tokens.names == EXPERT_TOKENS


def _forward(
    request: Request, weight: QuantizedWeight, operand: QuantizedOperand
) -> tuple[Literal["forward", "recompute"], ...]:
    """When the amax of what the output's product multiplies is reduced. A layer is repeated in its order, or only what the
    backward pass needs, and then under ``dots`` no product for its output alone."""
    runs = runs_of(request.table, request.remat)
    again = weight.stack is not None and any(run.again for run in runs if run.stack == weight.stack)
    if not request.properties.repeats_in_order:
        product = share_again(request.table, runs, request.table.weight(weight.name)) > 0
        backward = any(one.product != "output" and one.same_amax == operand.same_amax for one in weight.operands)
        again = again and (product or backward)
    return ("forward", "recompute") if again else ("forward",)


def layers_on_device(request: Request, mesh: Mesh, weight: QuantizedWeight) -> int:
    """The quantized layers of a weight that one device computes: all, or those of its pipeline stage."""
    return ceil(weight.num / mesh.size(request.layout.axes_with("stage", weight.component)))


def distinct(weights: Iterable[QuantizedWeight]) -> Iterator[tuple[QuantizedWeight, QuantizedOperand]]:
    """The operands of all weights, without those whose amaxes an earlier one has. Products come in the order of a step."""
    seen: set[tuple[str, ...]] = set()
    for weight in weights:
        for operand in weight.operands:
            if operand.same_amax not in seen:
                seen.add(operand.same_amax)
                yield weight, operand
