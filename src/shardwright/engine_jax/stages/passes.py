"""The passes of a stage: through its layers, forward and backward.

The forward pass keeps each layer's input, and what a policy of recomputation keeps besides (``kept.py``). The backward pass computes the rest
of a layer again, then its gradients. No device computes anything for a row of padding, or in a tick in which it waits: a layer is a branch, which all devices of a stage take together, and so
all devices of each collective in it.

S slots for live microbatches, N layers of a stage, C chunks of a device, B rows, L tokens, M embed. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from shardwright.core.pipeline.program import LayerRun, StackRows
from shardwright.core.program.program import LayerStack
from shardwright.core.program.walk import Walk
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.io.layer_io import Links, LowPrecision, Params, Site
from shardwright.engine_jax.io.recomputation import recomputed
from shardwright.engine_jax.io.scopes import of_phase
from shardwright.engine_jax.model.forward import computed_layer, in_use
from shardwright.engine_jax.stages.branches import computed_or_waited, zeros_of
from shardwright.engine_jax.stages.kept import Live, Places, Pull, arrays_to_keep, kept_places, with_kept
from shardwright.engine_jax.stages.turns import Turn

Out = TypeVar("Out")
Prepared = Sequence[Any]
"""What is made of a microbatch once, for all layers (``model/prepared.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOfStages:
    """A stack as a device has it: ``rows.padded.most`` rows for each of its chunks. ``names``: in a layer, by those of the table.
    ``counts_C``: the layers of each of the device's chunks; the other rows are padding. ``firsts_C``: the number in the stack of the
    first one."""

    stack: LayerStack
    rows: StackRows
    names: Mapping[str, str]
    counts_C: jax.Array
    firsts_C: jax.Array
    walk: Walk
    links: Links

    @property
    def most(self) -> int:
        return self.rows.padded.most

    def is_here(self, turn: Turn, number: jax.Array) -> jax.Array:
        """Whether this device computes a layer of its chunk in this turn."""
        return turn.active & (number < self.counts_C[turn.chunk])

    def is_in(self, run: LayerRun, turn: Turn, number: jax.Array) -> jax.Array:
        """Whether a layer of its chunk is one of a run of the stack."""
        place = self.firsts_C[turn.chunk] + number
        return (place >= run.layers.start) & (place < run.layers.stop)

    def low_in(self, run: LayerRun) -> Mapping[str, LowPrecision]:
        """The weights that are quantized in a run of the stack's layers."""
        return {name: self.links.low[name] for name in self.names if name in run.quantized}

    def site_of(self, site: Site | None, run: LayerRun, turn: Turn, number: jax.Array) -> Site | None:
        """Where a layer is. ``site``: of the microbatch, with the factors of all of the device's layers."""
        if site is None:
            return None
        factors = sorted({name for low in self.low_in(run).values() for name in low.delayed.values()})
        return site._replace(
            layer=self.stack.first_layer + self.firsts_C[turn.chunk] + number,
            factors={name: _row_of(site.factors[name], self, turn, number) for name in factors},
        )

    def computed_or_waited(
        self,
        run: LayerRun,
        turn: Turn,
        number: jax.Array,
        compute: Callable[[jax.Array], Out],
        wait: Callable[[jax.Array], Out],
        x_BLM: jax.Array,
    ) -> Out:
        """One of the two: ``compute`` where this device computes a layer of the run."""
        here = self.is_here(turn, number)
        if len(self.rows.runs) > 1:
            here &= self.is_in(run, turn, number)
        permutes = self.links.attention.ring is not None
        return computed_or_waited(here, compute, wait, x_BLM, run.share, permutes=permutes)

    def layer(
        self, x_BLM: jax.Array, at_rest: Params, given: Prepared, run: LayerRun, site: Site | None
    ) -> tuple[jax.Array, MoeCounts | None]:
        """A layer of a run of the stack. ``site``: where it is."""
        links, weights = in_use(at_rest, self.names, self.low_in(run), site, self.links)
        return computed_layer(x_BLM, self.stack, given, weights, self.walk, links)

    def differentiated(
        self, x_BLM: jax.Array, weights: Params, frozen: Params, given: Prepared, run: LayerRun, site: Site | None
    ) -> tuple[jax.Array, MoeCounts | None, Pull]:
        """A layer, and its backward pass: from the cotangent of its output to those of its input, its weights and its factors."""

        def output(x_BLM: jax.Array, at_rest: Params, factors: Params) -> tuple[jax.Array, MoeCounts | None]:
            with_factors = None if site is None else site._replace(factors=factors)
            return self.layer(x_BLM, {**at_rest, **frozen}, given, run, with_factors)

        if self.keeps_more:
            # The recomputation is in another branch than the forward pass, with which no compiler can merge it.
            output = recomputed(output, self.rows.kept, num_layers=self.most + 1)
        x_BLM, pull, counts = jax.vjp(output, x_BLM, weights, {} if site is None else site.factors, has_aux=True)
        return x_BLM, counts, pull

    @property
    def keeps_more(self) -> bool:
        """Whether a layer keeps more than its input."""
        return not self.rows.kept.keeps_nothing

    def places(
        self,
        x_BLM: jax.Array | jax.ShapeDtypeStruct,
        weights: Params,
        frozen: Params,
        given: Prepared,
        run: LayerRun,
        site: Site | None,
    ) -> Places:
        """Which arrays of a layer's backward pass are kept between the two passes."""
        if not self.keeps_more:
            return Places([], [])
        return kept_places(lambda x_BLM: self.differentiated(x_BLM, weights, frozen, given, run, site)[2], x_BLM)


class Forward(NamedTuple):
    """A stage's output, what is kept of the live microbatches, and the counts of the experts, by stack, with the stage's rows along the
    leading dim."""

    x_BLM: jax.Array
    live: Live
    counts: Mapping[str, MoeCounts]


def forward_pass(
    x_BLM: jax.Array,
    turn: Turn,
    given: Prepared,
    weights: Params,
    buffers: Params,
    site: Site | None,
    live: Live,
    stacks: Sequence[StackOfStages],
) -> Forward:
    """The output of a stage, or its input where the device waits. ``site``: of the microbatch, with the factors of all layers."""
    counts: dict[str, MoeCounts] = {}
    inputs_SNBLM, kept = live
    for one in stacks:

        def layer(
            carry: tuple[jax.Array, jax.Array, Sequence[jax.Array]], number: jax.Array, one: StackOfStages = one
        ) -> tuple[tuple[jax.Array, jax.Array, Sequence[jax.Array]], MoeCounts | None]:
            x_BLM, inputs_SNBLM, kept = carry
            here = one.is_here(turn, number)
            kept_BLM = jnp.where(here, x_BLM, _in_slot(inputs_SNBLM, turn, one.rows.first + number))
            inputs_SNBLM = _with_slot(inputs_SNBLM, kept_BLM, turn, one.rows.first + number)
            counted = None
            for run in one.rows.runs:

                def compute(
                    x_BLM: jax.Array, run: LayerRun = run
                ) -> tuple[jax.Array, MoeCounts | None, Sequence[jax.Array]]:
                    with of_phase("forward"):
                        own, frozen = _of_layer(weights, one, turn, number), _of_layer(buffers, one, turn, number)
                        here = one.site_of(site, run, turn, number)
                        if not one.keeps_more:
                            return *one.layer(x_BLM, {**own, **frozen}, given, run, here), []
                        places = one.places(x_BLM, own, frozen, given, run, here)
                        x_BLM, counts, pull = one.differentiated(x_BLM, own, frozen, given, run, here)
                        return x_BLM, counts, arrays_to_keep(pull, places)

                _, shapes, _ = jax.eval_shape(compute, x_BLM)

                def wait(
                    x_BLM: jax.Array, shapes: Any = shapes, kept: Sequence[jax.Array] = kept
                ) -> tuple[jax.Array, MoeCounts | None, Sequence[jax.Array]]:
                    return x_BLM, zeros_of(shapes), [_in_slot(array, turn, number) for array in kept]

                x_BLM, more, new = one.computed_or_waited(run, turn, number, compute, wait, x_BLM)
                counted = more if counted is None else jax.tree.map(jnp.add, counted, more)
                kept = [_with_slot(array, each, turn, number) for array, each in zip(kept, new, strict=True)]
            return (x_BLM, inputs_SNBLM, kept), counted

        (x_BLM, inputs_SNBLM, of_layers), of_stack = jax.lax.scan(
            layer, (x_BLM, inputs_SNBLM, kept[one.stack.name]), jnp.arange(one.most, dtype=jnp.int32)
        )
        kept = {**kept, one.stack.name: of_layers}
        if of_stack is not None:
            counts[one.stack.name] = of_stack
    return Forward(x_BLM, Live(inputs_SNBLM, kept), counts)


class Backward(NamedTuple):
    """The cotangent of a stage's input, and with those of this turn: the gradients, and the amaxes of the step."""

    cotangent_BLM: jax.Array
    gradients: Params
    amaxes: Params


def backward_pass(
    cotangent_BLM: jax.Array,
    turn: Turn,
    given: Prepared,
    weights: Params,
    buffers: Params,
    site: Site | None,
    live: Live,
    before: tuple[Params, Params],
    stacks: Sequence[StackOfStages],
) -> Backward:
    """``cotangent_BLM``: of the stage's output. ``before``: gradients and amaxes of all of the device's layers, by weight and by factor."""
    gradients, amaxes = before
    for one in reversed(stacks):
        names = [name for name in one.names if name in weights]
        low = {name for run in one.rows.runs for each in one.low_in(run).values() for name in each.delayed.values()}

        def layer(
            carry: tuple[jax.Array, Params, Params],
            number: jax.Array,
            one: StackOfStages = one,
        ) -> tuple[tuple[jax.Array, Params, Params], None]:
            cotangent_BLM, gradients, amaxes = carry
            for run in one.rows.runs:

                def compute(cotangent_BLM: jax.Array, run: LayerRun = run) -> tuple[jax.Array, Params, Params]:
                    with of_phase("recompute"):
                        own, frozen = _of_layer(weights, one, turn, number), _of_layer(buffers, one, turn, number)
                        here = one.site_of(site, run, turn, number)
                        x_BLM = _in_slot(live.inputs_SNBLM, turn, one.rows.first + number)
                        places = one.places(x_BLM, own, frozen, given, run, here)
                        _, _, pull = one.differentiated(x_BLM, own, frozen, given, run, here)
                        if one.keeps_more:
                            kept = [_in_slot(array, turn, number) for array in live.kept[one.stack.name]]
                            pull = with_kept(pull, kept, places)
                    return pull(cotangent_BLM)

                _, *shapes = jax.eval_shape(compute, cotangent_BLM)

                def wait(cotangent_BLM: jax.Array, shapes: Any = shapes) -> tuple[jax.Array, Params, Params]:
                    return cotangent_BLM, *zeros_of(shapes)

                cotangent_BLM, more, largest = one.computed_or_waited(run, turn, number, compute, wait, cotangent_BLM)
                row = turn.chunk * one.most + number
                gradients = _with_row(gradients, more, row, jnp.add)
                amaxes = _with_row(amaxes, largest, row, jnp.maximum)
            return (cotangent_BLM, gradients, amaxes), None

        own = {name: gradients[name] for name in names}, {name: amaxes[name] for name in sorted(low)}
        (cotangent_BLM, *own), _ = jax.lax.scan(
            layer, (cotangent_BLM, *own), jnp.arange(one.most, dtype=jnp.int32), reverse=True
        )
        gradients, amaxes = {**gradients, **own[0]}, {**amaxes, **own[1]}
    return Backward(cotangent_BLM, gradients, amaxes)


def _of_layer(stacked: Params, one: StackOfStages, turn: Turn, number: jax.Array) -> Params:
    """The weights at rest of one of the device's layers, of those that are in ``stacked``."""
    return {name: _row_of(stacked[name], one, turn, number) for name in one.names if name in stacked}


def _row_of(stacked: jax.Array, one: StackOfStages, turn: Turn, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, turn.chunk * one.most + number, keepdims=False)


def _in_slot(array: jax.Array, turn: Turn, number: jax.Array) -> jax.Array:
    """What is kept of a layer in a turn's slot. ``array``: of all slots and layers."""
    shape = array.shape[2:]
    return jax.lax.dynamic_slice(array, _start(turn, number, shape), (1, 1, *shape)).reshape(shape)


def _with_slot(array: jax.Array, new: jax.Array, turn: Turn, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, new[None, None], _start(turn, number, new.shape))


def _start(turn: Turn, number: jax.Array, shape: Sequence[int]) -> tuple[jax.Array, ...]:
    return (turn.slot, number, *(jnp.int32(0) for _ in shape))


def _with_row(
    total: Params, more: Params, row: jax.Array, joined: Callable[[jax.Array, jax.Array], jax.Array]
) -> Params:
    """What all layers have so far, by name, with what one of them has in addition; ``joined``: with what it has so far. A weight that stays
    gathered has its cotangent in the dtype of its use, which may be wider than that of its sum, as a router's is: it is cast before the sum, as
    where it is scattered in each microbatch."""

    def with_row(total: jax.Array, more: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_index_in_dim(total, row, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, joined(before, more.astype(total.dtype)), row, 0)

    return {name: with_row(array, more[name]) if name in more else array for name, array in total.items()}
