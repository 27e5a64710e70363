"""The passes of a stage: through its layers, forward and backward.

The forward pass keeps each layer's input. The backward pass computes a layer again from it, then its gradients. No device computes
anything for a row of padding, or in a tick in which it waits: a layer is a branch, which all devices of a stage take together, and so
all devices of each collective in it.

S slots for live microbatches, N layers of a stage, C chunks of a device, B rows, L tokens, M embed. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.pipeline.program import StackRows
from shardwright.engine_jax.experts.moe import MoeCounts
from shardwright.engine_jax.io.layer_io import Links, Params
from shardwright.engine_jax.io.scopes import of_branch, of_phase
from shardwright.engine_jax.model.forward import computed_layer
from shardwright.engine_jax.stages.ends import FromInput
from shardwright.models.parts.architecture import Architecture, Stack


class Turn(NamedTuple):
    """What this device computes in a tick: scalars, as in ``core/schedules/ticks.py``."""

    active: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOfStages:
    """A stack as a device has it: ``rows.padded.most`` rows for each of its chunks. ``names``: in a layer, by those of the table.
    ``counts_C``: the layers of each of the device's chunks; the other rows are padding."""

    stack: Stack
    rows: StackRows
    names: Mapping[str, str]
    counts_C: jax.Array
    architecture: Architecture
    links: Links

    @property
    def most(self) -> int:
        return self.rows.padded.most

    def is_here(self, turn: Turn, number: jax.Array) -> jax.Array:
        """Whether this device computes a layer of its chunk in this turn."""
        return turn.active & (number < self.counts_C[turn.chunk])

    def layer(self, x_BLM: jax.Array, at_rest: Params, given: FromInput) -> tuple[jax.Array, MoeCounts | None]:
        weights = {self.names[name]: self.links.use(name, array) for name, array in at_rest.items()}
        return computed_layer(
            x_BLM, given.valid_BL, weights, self.stack, self.architecture, given.rotation, given.mask, self.links
        )


class Forward(NamedTuple):
    """A stage's output, the inputs that are kept, and the counts of the experts, by stack, with the stage's rows along the leading dim."""

    x_BLM: jax.Array
    inputs_SNBLM: jax.Array
    counts: Mapping[str, MoeCounts]


def forward_pass(
    x_BLM: jax.Array,
    turn: Turn,
    given: FromInput,
    params: Params,
    inputs_SNBLM: jax.Array,
    stacks: Sequence[StackOfStages],
) -> Forward:
    """The output of a stage, or its input where the device waits."""
    counts: dict[str, MoeCounts] = {}
    for one in stacks:

        def layer(
            carry: tuple[jax.Array, jax.Array], number: jax.Array, one: StackOfStages = one
        ) -> tuple[tuple[jax.Array, jax.Array], MoeCounts | None]:
            x_BLM, inputs_SNBLM = carry
            here = one.is_here(turn, number)
            kept_BLM = jnp.where(here, x_BLM, _kept(inputs_SNBLM, turn, one, number))
            inputs_SNBLM = jax.lax.dynamic_update_slice(
                inputs_SNBLM, kept_BLM[None, None], _place(turn, one, number, x_BLM)
            )

            def compute(x_BLM: jax.Array) -> tuple[jax.Array, MoeCounts | None]:
                with of_phase("forward"):
                    return one.layer(x_BLM, _of_layer(params, one, turn, number), given)

            _, shapes = jax.eval_shape(compute, x_BLM)

            def wait(x_BLM: jax.Array) -> tuple[jax.Array, MoeCounts | None]:
                return x_BLM, zeros_of(shapes)

            with of_branch(one.rows.share):
                x_BLM, counted = jax.lax.cond(here, compute, wait, x_BLM)
            return (x_BLM, inputs_SNBLM), counted

        (x_BLM, inputs_SNBLM), of_stack = jax.lax.scan(
            layer, (x_BLM, inputs_SNBLM), jnp.arange(one.most, dtype=jnp.int32)
        )
        if of_stack is not None:
            counts[one.stack.name] = of_stack
    return Forward(x_BLM, inputs_SNBLM, counts)


class Backward(NamedTuple):
    """The cotangent of a stage's input, and the gradients with those of this turn added."""

    cotangent_BLM: jax.Array
    gradients: Params


def backward_pass(
    cotangent_BLM: jax.Array,
    turn: Turn,
    given: FromInput,
    weights: Params,
    buffers: Params,
    inputs_SNBLM: jax.Array,
    gradients: Params,
    stacks: Sequence[StackOfStages],
) -> Backward:
    """``cotangent_BLM``: of the stage's output. ``gradients``: of all of the device's layers, by weight."""
    for one in reversed(stacks):
        names = [name for name in one.names if name in weights]

        def layer(
            carry: tuple[jax.Array, Params],
            number: jax.Array,
            one: StackOfStages = one,
            names: Sequence[str] = names,
        ) -> tuple[tuple[jax.Array, Params], None]:
            cotangent_BLM, gradients = carry

            def compute(cotangent_BLM: jax.Array) -> tuple[jax.Array, Params]:
                frozen = _of_layer(buffers, one, turn, number)

                def output(x_BLM: jax.Array, at_rest: Params) -> jax.Array:
                    return one.layer(x_BLM, {**at_rest, **frozen}, given)[0]

                with of_phase("recompute"):
                    x_BLM = _kept(inputs_SNBLM, turn, one, number)
                    _, pull = jax.vjp(output, x_BLM, _of_layer(weights, one, turn, number))
                return pull(cotangent_BLM)

            _, shapes = jax.eval_shape(compute, cotangent_BLM)

            def wait(cotangent_BLM: jax.Array) -> tuple[jax.Array, Params]:
                return cotangent_BLM, zeros_of(shapes)

            with of_branch(one.rows.share):
                cotangent_BLM, more = jax.lax.cond(one.is_here(turn, number), compute, wait, cotangent_BLM)
            row = turn.chunk * one.most + number
            return (cotangent_BLM, {name: _added(gradients[name], more[name], row) for name in names}), None

        own = {name: gradients[name] for name in names}
        (cotangent_BLM, own), _ = jax.lax.scan(
            layer, (cotangent_BLM, own), jnp.arange(one.most, dtype=jnp.int32), reverse=True
        )
        gradients = {**gradients, **own}
    return Backward(cotangent_BLM, gradients)


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _of_layer(stacked: Params, one: StackOfStages, turn: Turn, number: jax.Array) -> Params:
    """The weights at rest of one of the device's layers, of those that are in ``stacked``."""
    row = turn.chunk * one.most + number
    return {
        name: jax.lax.dynamic_index_in_dim(stacked[name], row, keepdims=False) for name in one.names if name in stacked
    }


def _kept(inputs_SNBLM: jax.Array, turn: Turn, one: StackOfStages, number: jax.Array) -> jax.Array:
    """The input of a layer that is kept in a turn's slot."""
    shape = inputs_SNBLM.shape[2:]
    start = _place(turn, one, number, jax.ShapeDtypeStruct(shape, inputs_SNBLM.dtype))
    return jax.lax.dynamic_slice(inputs_SNBLM, start, (1, 1, *shape)).reshape(shape)


def _place(
    turn: Turn, one: StackOfStages, number: jax.Array, x_BLM: jax.Array | jax.ShapeDtypeStruct
) -> tuple[jax.Array, ...]:
    return (turn.slot, one.rows.first + number, *(jnp.int32(0) for _ in x_BLM.shape))


def _added(total: jax.Array, more: jax.Array, row: jax.Array) -> jax.Array:
    """The gradients of all layers, with those of one added."""
    before = jax.lax.dynamic_index_in_dim(total, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, before + more, row, 0)
