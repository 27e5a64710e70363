"""What of a layer's communication its backward pass repeats: moves of activations, and gathers of weights."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.model.table import ModelTable, Move, Weight
from shardwright.core.policies.policy import INPUT
from shardwright.core.policies.runs import Run, product_of


@lru_cache(maxsize=4096)
def moved_again(table: ModelTable, engine: Engine, runs: tuple[Run, ...], move: Move) -> Fraction:
    """The share of the layers with a move whose backward pass repeats it.

    It needs no result that only leaves the layer. But some engines repeat a layer that keeps nothing in its order, up to the last result that it
    needs: also such a move, if another part of the layer (shared experts) follows.

    Saved products spare no move: gradients of weights need the inputs of products, and later norms their sums over devices.
    """
    in_order = ENGINES[engine].repeats_in_order and (not move.ends_layer or _part_follows(table, move))
    stacks = table.activation(move.target).stacks or table.activation(move.source).stacks
    having = [run for run in runs if not stacks or run.stack in stacks]
    made = made_by(table, move)
    found = [
        run
        for run in having
        if run.again and ((run.keeps_nothing and in_order) or (made in run.again and not move.ends_layer))
    ]
    return Fraction(sum(len(run.layers) for run in found), max(1, sum(len(run.layers) for run in having)))


@lru_cache(maxsize=4096)
def share_again(table: ModelTable, runs: tuple[Run, ...], weight: Weight) -> float:
    """The share of a stack's layers in whose backward pass the product of tokens with a weight is computed again."""
    of_stack = [run for run in runs if run.stack == weight.stack]
    if not of_stack:
        return 0.0
    made = {one.output for one in table.operations if weight.name_in_layer in one.weights} or {product_of(weight)}
    found = sum(len(run.layers) for run in of_stack if made & run.again)
    return found / sum(len(run.layers) for run in of_stack)


@lru_cache(maxsize=4096)
def share_made_again(runs: tuple[Run, ...], name: str) -> float:
    """The share of the layers with an activation in whose backward pass it is made again."""
    having = [run for run in runs if name in run.made]
    return sum(len(run.layers) for run in having if name in run.again) / max(1, sum(len(run.layers) for run in having))


def made_by(table: ModelTable, move: Move) -> str:
    """The activation that a move makes: its target, or the residual stream between the parts of a layer. What it makes of a layer's
    output has no name but its source: ``INPUT`` is what the layer began with."""
    if move.target != INPUT:
        return move.target
    between = (one.output for one in table.operations if move.source in one.inputs and INPUT in one.inputs)
    return next(between, move.source)


def layers_gathered_again(runs: Sequence[Run], stack: str | None, layers: range) -> int:
    """How many of a stack's layers gather their weights again, by their numbers in it; those beyond its runs are as the last."""
    found = [run for run in runs if run.stack == stack]
    if not found:
        return 0
    inside = sum(len(_common(run.layers, layers)) for run in found if run.gathers_again)
    beyond = len(range(max(layers.start, found[-1].layers.stop), layers.stop)) if found[-1].gathers_again else 0
    return inside + beyond


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def gathers_again(runs: Sequence[Run], stack: str | None, number: int) -> bool:
    """Whether a layer's weights are gathered again. ``number``: in the stack; one beyond its runs is as the last."""
    found = [run for run in runs if run.stack == stack]
    of_layer = (run for run in found if number in run.layers)
    return bool(found) and next(of_layer, found[-1]).gathers_again


def _part_follows(table: ModelTable, move: Move) -> bool:
    """Whether another part of the same layers reads the residual stream after a move."""
    layers = {*table.activation(move.source).stacks, *table.activation(move.target).stacks}
    number = next(n for n, one in enumerate(table.moves) if (one.source, one.target) == (move.source, move.target))
    later = table.moves[number + 1 :]
    return any(after.source == INPUT and layers & {*table.activation(after.target).stacks} for after in later)
