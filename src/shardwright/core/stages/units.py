"""The units that stages are made of: the embedding, each layer, and the logits, with the work of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from shardwright.core.model.table import ModelTable, Weight

Letter = Literal["E", "t", "L"]
"""E: the embedding. t: a layer. L: final norm, logits and loss. Those of Megatron's pipeline layouts."""

EMBEDDING, LAYER, LOGITS = "E", "t", "L"

BACKWARD = 2
"""Backward is twice forward (arXiv:2204.02311, appendix B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """``layer``: its number in the model; None for the ends. ``forward``: flops of a token in the forward pass. ``step``: those
    of a step, with the backward pass and what is recomputed."""

    letter: Letter
    layer: int | None
    forward: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Seconds of one pass of a unit: ``computed``; ``hideable``, the communication that may run beside products; ``waited``, which may not."""

    computed: float
    hideable: float
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What a unit takes on the chips of a plan. ``seconds``: of all passes of a microbatch. ``stored_bytes``: on a device, with gradients,
    moments, and weights that stay gathered. ``saved_bytes``: of a live microbatch. ``working_bytes``: what one pass needs besides.
    ``passes``: what the seconds are of, pass by pass."""

    seconds: float
    stored_bytes: int
    saved_bytes: int
    working_bytes: int
    passes: tuple[PassCost, ...] = ()


def least_seconds(costs: Iterable[UnitCost]) -> float:
    """At least so long all passes of units take that one device computes, for a microbatch: the communication of one may be hidden behind the
    products of another, but all of it behind no more than all products."""
    return sum(
        sum(cost.waited for cost in of_pass)
        + max(sum(cost.computed for cost in of_pass), sum(cost.hideable for cost in of_pass))
        for of_pass in zip(*(cost.passes for cost in costs), strict=True)
    )


@lru_cache(maxsize=256)
def units_of(
    table: ModelTable, length: int, *, recomputed: bool, ends: tuple[Letter, ...] = ("E", "L")
) -> tuple[Unit, ...]:
    """The units of a model in the order of the forward pass.

    Flops of a token: 2 for each element of a weight that it is multiplied with (of an expert's weights the share of tokens that it gets),
    and the two products of attention with ``length`` keys. ``recomputed``: whether the backward pass computes a layer again.
    ``ends``: those that stages have.
    """
    found: list[Unit] = []
    if "E" in ends:
        found.append(_unit("E", None, 0.0, again=False))
    attended = _attended(table, length)
    for layer in range(table.num_layers):
        own = [w for w in table.weights if w.stack and w.first_layer <= layer < w.first_layer + w.num]
        flops = sum(_flops(table, weight) for weight in own if weight.component != "embedding")
        found.append(_unit("t", layer, flops + attended, again=recomputed))
    if "L" in ends:
        logits = [w for w in table.weights if w.stack is None and "logits" in (w.component, *w.uses)]
        found.append(_unit("L", None, sum(_flops(table, weight) for weight in logits), again=False))
    return tuple(found)


def _unit(letter: Letter, layer: int | None, forward: float, *, again: bool) -> Unit:
    return Unit(letter=letter, layer=layer, forward=forward, step=forward * (1 + int(again) + BACKWARD))


def _flops(table: ModelTable, weight: Weight) -> float:
    if len(weight.shape) < 2:
        return 0.0
    chosen = table.top_k / weight.size("experts") if table.top_k and "experts" in weight.logical_axes else 1.0
    return 2.0 * prod(weight.shape) * chosen


def _attended(table: ModelTable, length: int) -> float:
    """The products of queries with keys, and of attention weights with values, without a saving for causality."""
    rows = {row.name: row for row in table.activations}
    names = (table.names.queries, table.names.keys_attended, table.names.values_attended)
    if not all(name in rows for name in names):
        return 0.0
    queries, keys, values = (rows[name] for name in names)
    widths = table.size(keys, "head_dim") + table.size(values, "head_dim")
    return 2.0 * length * table.size(queries, "heads") * widths


def total(units: Sequence[Unit]) -> float:
    """Flops of a token in a step."""
    return sum(unit.step for unit in units)
