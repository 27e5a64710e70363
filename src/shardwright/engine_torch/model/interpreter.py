"""The operations of a walk as calls, one after the other: each calls its primitive, is resharded as planned, and gets its name.

All that does not change from step to step is bound when a model is built: which primitive, with which numbers, of which values. A run has
the values that it still needs in places of a list.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.core.program.primitives import (
    Add,
    Bias,
    Cap,
    Embed,
    Gate,
    Join,
    Norm,
    Product,
    Rotate,
    Route,
    Scale,
    Split,
    Take,
)
from shardwright.core.program.program import Step, Value
from shardwright.core.program.walk import AttentionGroup, ExpertGroup, LossGroup, Operation, Walk, steps_of
from shardwright.engine_torch.attention.attend import attention, own_heads, own_kv_heads
from shardwright.engine_torch.experts.experts import MoeCounts, through_experts
from shardwright.engine_torch.experts.grouped import Matrices
from shardwright.engine_torch.experts.route import route
from shardwright.engine_torch.io.dtypes import kept, torch_dtype
from shardwright.engine_torch.io.layer_io import ALONE, InUse, Links, LowPrecision
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.layers.chunked_loss import chunked_cross_entropy
from shardwright.engine_torch.layers.elementwise import added, capped, joined, with_bias
from shardwright.engine_torch.layers.embedding import Scoring, embed, scores
from shardwright.engine_torch.layers.gate import gated
from shardwright.engine_torch.layers.loss import summed_cross_entropy
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.layers.product import NONE_AGREED, weight_product, wide_product
from shardwright.engine_torch.layers.rotate import rotate
from shardwright.engine_torch.precision.operands import Amaxes, input_amaxes


class Now:
    """What the operations of one run have besides values: the ``weights`` in use and how those are quantized that are, by their names in
    the layer; what is ``prepared`` for all layers, in the order of the walk; amaxes of inputs that several weights multiply; and what the
    experts of the run count."""

    __slots__ = ("amaxes", "counts", "low", "prepared", "weights")

    def __init__(self, weights: InUse, low: Mapping[str, LowPrecision], prepared: Sequence[Any] = ()) -> None:
        self.weights, self.low, self.prepared = weights, low, prepared
        self.amaxes: dict[Value, Amaxes] = {}
        self.counts: MoeCounts | None = None


Run = Callable[..., Any]
"""``run(now, *inputs)``: the output of an operation, or its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An operation and how it is done. ``inputs``, ``outputs``: values of layers and ends; ``run`` has what is made of the batch alone."""

    run: Run
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Calls:
    """Operations from values that are ``given`` to ``results``. ``naming``: what a policy may keep is named."""

    def __init__(
        self,
        walk: Walk,
        operations: Sequence[Operation],
        given: Sequence[Value],
        results: Sequence[Value],
        links: Links,
        *,
        naming: bool = True,
    ) -> None:
        places = {value: place for place, value in enumerate(given)}
        bound = [_bound(operation, walk, links) for operation in _summands_first(operations)]
        for one in bound:
            for value in one.outputs:
                places[value] = len(places)
        last = {value: number for number, one in enumerate(bound) for value in one.inputs}
        last |= dict.fromkeys(results, len(bound))
        self._more = [None] * (len(places) - len(given))
        self._results = [places[value] for value in results]
        self._calls = [
            (
                one.run,
                _one_or_all([places[value] for value in one.inputs]),
                _one_or_all([places[value] for value in one.outputs]),
                [value.name if naming and value in walk.named else "" for value in one.outputs],
                [places[value] for value in dict.fromkeys(one.inputs) if last[value] == number],
            )
            for number, one in enumerate(bound)
        ]

    def __call__(self, now: Now, *given: torch.Tensor | None) -> list[Any]:
        values: list[Any] = [*given, *self._more]
        for run, inputs, outputs, names, last in self._calls:
            # Most operations make one value of one, for which no list is made.
            made = run(now, values[inputs]) if isinstance(inputs, int) else run(now, *map(values.__getitem__, inputs))
            for place in last:
                values[place] = None
            if isinstance(outputs, int):
                values[outputs] = named(made, names[0]) if names[0] else made
                continue
            for place, name, output in zip(outputs, names, made, strict=True):
                values[place] = named(output, name) if name else output
        return [values[place] for place in self._results]


def _summands_first(operations: Sequence[Operation]) -> list[Operation]:
    """Each summand is taken to where it is added as soon as it is made: what ranks have parts of is not held until the last one is made."""
    found: list[Operation] = []
    for operation in operations:
        place = len(found)
        if isinstance(operation, Step) and isinstance(operation.does, Take) and not operation.output.name:
            (source,) = operation.inputs
            place = next((n + 1 for n, one in enumerate(found) if source in steps_of(one)[-1].outputs), place)
        found.insert(place, operation)
    return found


def _one_or_all(places: Sequence[int]) -> int | Sequence[int]:
    return places[0] if len(places) == 1 else places


def _bound(operation: Operation, walk: Walk, links: Links) -> Bound:
    match operation:
        case AttentionGroup():
            return _attention(operation, walk, links)
        case ExpertGroup():
            return _experts(operation, links)
        case LossGroup():
            return _loss(operation, links)
        case Step():
            of_batch = () if walk.prepared_at(operation) is None else walk.program.of_batch
            inputs = tuple(value for value in operation.inputs if value not in of_batch)
            return Bound(run=_run_of(operation, walk, links), inputs=inputs, outputs=operation.outputs)


def _run_of(step: Step, walk: Walk, links: Links) -> Run:
    name, place = step.weights[0].name if step.weights else "", walk.prepared_at(step) or 0
    match step.does:
        case Take():
            source, target = step.inputs[0].row, step.output.row
            return lambda _, x: links.move(source, target, x)
        case Product():
            return _product(step, step.does, walk, links)
        case Norm(eps=eps):
            return lambda now, x: rms_norm(x, now.weights[name], eps, split=links.split)
        case Rotate(rope=rope):
            return lambda now, x: rotate(x, now.prepared[place], rope.interleaved)
        case Gate():
            return lambda _, gate, up: gated(gate, up)
        case Route() as form:
            return lambda now, x: route(x, now.prepared[place], now.weights[name] if name else None, form)
        case Embed():
            peers = links.vocab.get(step.output.component, ALONE)
            return lambda now, ids: embed(ids, now.weights[name], peers)
        case Add():
            return lambda _, *summands: added(*summands)
        case Bias(dims=dims):
            numbers = [step.inputs[0].dims.index(dim) for dim in dims]
            return lambda now, x: with_bias(x, now.weights[name], numbers)
        case Scale(factor=factor):
            return lambda _, x: x * factor
        case Cap(limit=limit):
            return lambda _, x: capped(x, limit)
        case Split(widths=widths):
            return lambda _, x: x.split(list(widths), dim=-1)
        case Join():
            return lambda _, *parts: joined(*parts)
        case _:
            raise AssertionError(step)


def _product(step: Step, does: Product, walk: Walk, links: Links) -> Run:
    (use,), source = step.weights, step.inputs[0]
    dtype = _dtype_of(step.output) or kept("product", links.dtype)
    name, together = use.name, walk.weights_of_input(step)
    # A weight is stored as a matrix, with the dims of outputs and of inputs merged.
    first = len(source.dims) - len(does.dims.contracted)
    sizes = [step.output.sizes.get(dim) or walk.program.sizes[dim] for dim in does.dims.outputs[1:]]
    assert source.dims[first:] == does.dims.contracted or does.dims.batched, does.dims

    merges = len(does.dims.contracted) > 1

    def product(now: Now, x: torch.Tensor) -> torch.Tensor:
        if merges:
            x = x.flatten(first)
        if now.low and len(together) > 1 and source not in now.amaxes:
            now.amaxes[source] = input_amaxes([x], map(now.low.get, together))
        amaxes = now.amaxes.get(source, NONE_AGREED)
        y = weight_product(x, now.weights[name], now.low.get(name), amaxes, dtype)
        return y.unflatten(-1, (-1, *sizes)) if sizes else y

    if use.in_use_dtype is not None:
        return lambda now, x: wide_product(x, now.weights[name])
    return product


def _attention(group: AttentionGroup, walk: Walk, links: Links) -> Bound:
    held = tuple(take.output for take in group.takes)
    # In a ring there is no value of all keys to keep.
    in_ring = links.attention.ring.group is not None
    between = Calls(walk, group.between, held, (group.keys, group.values), links, naming=not in_ring)
    takes = [_run_of(take, walk, links) for take in group.takes]
    by_heads = {
        use.name: walk.program.width_of(step.output)
        for step in group.between
        for use in step.weights
        if "heads" in use.logical_axes
    }
    place = walk.prepared_at(group.attend)
    assert place is not None, group.attend

    def run(now: Now, q_BTHD: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        num_heads = q_BTHD.shape[2]
        own = {name: own_heads(now.weights[name], num_heads * of, links.attention) for name, of in by_heads.items()}
        weights = {**now.weights, **own} if own else now.weights

        def take(held: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return tuple(move(now, x) for move, x in zip(takes, held, strict=True))

        def keys_and_values(held: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            k_BSKD, v_BSKE = between(Now(weights, now.low, now.prepared), *held)
            if not group.shares_heads:
                return k_BSKD, v_BSKE
            return own_kv_heads(k_BSKD, num_heads, links.attention), own_kv_heads(v_BSKE, num_heads, links.attention)

        return attention(q_BTHD, sources, take, keys_and_values, now.prepared[place], group.scale, links.attention)

    return Bound(run=run, inputs=(group.queries, *(take.inputs[0] for take in group.takes)), outputs=(group.output,))


def _experts(group: ExpertGroup, links: Links) -> Bound:
    names = [product.weights[0].name for product in group.products]

    def run(now: Now, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        matrices = Matrices(*(now.weights[name] for name in names))
        out, now.counts = through_experts(x, experts, weights, matrices, group, links.experts, now.low)
        return out

    return Bound(run=run, inputs=(group.tokens, group.experts, group.weights), outputs=(group.output,))


def _loss(group: LossGroup, links: Links) -> Bound:
    """Its outputs are the logits, None where they are not all made at one time, and the loss."""
    (use,) = group.product.weights
    scoring = Scoring(
        dtype=_dtype_of(group.product.output),
        on_each=tuple(step.does for step in group.between if isinstance(step.does, Cap | Scale)),
        peers=links.vocab.get(group.product.output.component, ALONE),
        entries=links.entries,
    )

    def run(
        now: Now, x: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        kernel, at_site = now.weights[use.name], replace(scoring, low=now.low.get(use.name))
        if links.loss_chunks > 1:
            return None, chunked_cross_entropy(x, kernel, targets, valid, at_site, links.loss_chunks)
        logits = scores(x, kernel, at_site)
        return logits, summed_cross_entropy(logits, targets, valid, scoring.peers)

    return Bound(
        run=run, inputs=(group.input, *group.loss.inputs[1:]), outputs=(group.loss.inputs[0], group.loss.output)
    )


def _dtype_of(value: Value) -> torch.dtype | None:
    return None if value.dtype is None else torch_dtype(value.dtype)
