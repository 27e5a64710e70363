"""The ticks of a step in stages: both passes of every microbatch, and the permutes between stages.

In a tick a device computes a forward pass of one microbatch and a backward pass of another, each of one of its stages, or waits. Then
it passes its output on to the next device, and the cotangent of its input back to the one before. JAX differentiates no tick: the
backward passes are steps of the same loop, so that only the inputs of live microbatches are kept.

B rows, L tokens, M embed, V vocabulary, S slots, N layers of a stage, C chunks of a device. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.pipeline.program import StageProgram
from shardwright.core.schedules.ticks import Turn as PlannedTurn
from shardwright.engine_jax.experts.moe import MoeCounts
from shardwright.engine_jax.io.layer_io import Links, Params, Ring, index_of
from shardwright.engine_jax.io.redistribute import passed_on
from shardwright.engine_jax.io.scopes import of_branch, of_component, of_phase, of_tensor
from shardwright.engine_jax.stages.ends import (
    EMBEDDING,
    FromInput,
    embedded,
    from_input,
    loss_at_the_end,
    names_at_the_end,
)
from shardwright.engine_jax.stages.passes import StackOfStages, Turn, backward_pass, forward_pass, zeros_of
from shardwright.models.parts.architecture import Architecture

Arrays = Mapping[str, jax.Array]


class Sums(NamedTuple):
    """Of a step, on one device: the loss and the gradients, summed over its own tokens; and the counts of the experts, by stack, with
    the layers of its stages along the leading dim."""

    loss: jax.Array
    by_weight: Params
    counts: Mapping[str, MoeCounts]


class Carry(NamedTuple):
    """Between two ticks: what the neighbours sent, what is kept, and the sums."""

    received_BLM: jax.Array
    received_cotangent_BLM: jax.Array
    inputs_SNBLM: jax.Array
    sums: Sums


def sums_of_stages(
    program: StageProgram, mesh: Mesh, table: ModelTable, links: Links, weights: Params, buffers: Params, batch: Arrays
) -> Sums:
    """``links``: of the plan of the program. ``batch``: a device's rows, of each microbatch along the leading dim."""
    rank = index_of(program.axes)
    # Masks need collectives of their own, and are those of all stages of a device: they are made once.
    given = jax.lax.map(lambda one: from_input(one, table.architecture, links), batch)
    device = _Device(
        program=program,
        architecture=table.architecture,
        links=links,
        rank=rank,
        weights=weights,
        buffers=buffers,
        batch=batch,
        given=given,
        stacks=_stacks(program, table, links, rank),
    )
    ring = Ring.over(mesh, program.axes)
    back = replace(ring, numbers=ring.numbers[::-1])

    def tick(carry: Carry, turns: tuple[Turn, Turn]) -> tuple[Carry, None]:
        forward, backward = turns
        sums = carry.sums
        x_BLM = device.stage_input(carry.received_BLM, forward)
        out = forward_pass(x_BLM, forward, device.given_of(forward), device.params, carry.inputs_SNBLM, device.stacks)
        # The last stage has both passes of a microbatch in one tick.
        loss, cotangent_BLM, gradients = device.stage_cotangent(
            carry.received_cotangent_BLM, out.x_BLM, sums.by_weight, backward
        )
        cotangent_BLM, gradients = backward_pass(
            cotangent_BLM,
            backward,
            device.given_of(backward),
            weights,
            buffers,
            out.inputs_SNBLM,
            gradients,
            device.stacks,
        )
        gradients = device.into_the_embedding(cotangent_BLM, gradients, backward)
        counts = {name: _counted(sums.counts[name], more, forward, program) for name, more in out.counts.items()}
        with of_component("residual"), of_tensor("residual.stream"):
            with of_phase("forward"):
                received_BLM = passed_on(out.x_BLM, ring)
            with of_phase("backward"):
                received_cotangent_BLM = passed_on(cotangent_BLM, back)
        after = Sums(sums.loss + loss, gradients, counts)
        return Carry(received_BLM, received_cotangent_BLM, out.inputs_SNBLM, after), None

    turns = _turns(program.ticks.forward, rank), _turns(program.ticks.backward, rank)
    after, _ = jax.lax.scan(tick, device.before_the_first_tick(), turns)
    return after.sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """What a device has in a step: its weights at rest, and of each microbatch its rows and what follows from them."""

    program: StageProgram
    architecture: Architecture
    links: Links
    rank: jax.Array | int
    weights: Params
    buffers: Params
    batch: Arrays
    given: FromInput
    stacks: Sequence[StackOfStages]

    @property
    def params(self) -> Params:
        return {**self.weights, **self.buffers}

    def rows_of(self, turn: Turn) -> Arrays:
        return _of_microbatch(self.batch, turn.microbatch)

    def given_of(self, turn: Turn) -> FromInput:
        return _of_microbatch(self.given, turn.microbatch)

    def is_first(self, turn: Turn) -> jax.Array:
        """Whether this device computes the first stage in a turn."""
        return turn.active & (self.rank == 0) & (turn.chunk == 0)

    def is_last(self, turn: Turn) -> jax.Array:
        return turn.active & (self.rank == self.program.ranks - 1) & (turn.chunk == self.program.virtual - 1)

    def stage_input(self, received_BLM: jax.Array, turn: Turn) -> jax.Array:
        """What the stage before has sent, or in the first stage the embedding."""

        def embedding(_: jax.Array) -> jax.Array:
            with of_phase("forward"):
                return embedded(self.rows_of(turn)["tokens"], self.weights[EMBEDDING], self.links)

        with of_branch(self.program.embedding):
            return jax.lax.cond(self.is_first(turn), embedding, lambda received_BLM: received_BLM, received_BLM)

    def stage_cotangent(
        self, received_BLM: jax.Array, out_BLM: jax.Array, gradients: Params, turn: Turn
    ) -> tuple[jax.Array, jax.Array, Params]:
        """The loss of a microbatch, the cotangent of the stage's output, and the gradients with those of the final norm and the logits
        added. In the last stage that follows from its output; in all others it is what the stage behind has sent, and 0 is added."""
        names = names_at_the_end(self.weights)
        own = {name: gradients[name] for name in names}

        def summed(x_BLM: jax.Array, at_the_end: Params) -> jax.Array:
            return loss_at_the_end(x_BLM, at_the_end, self.rows_of(turn), self.architecture, self.links)

        def at_the_end(x_BLM: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            at_rest = {name: self.weights[name] for name in names}
            loss, (cotangent_BLM, more) = jax.value_and_grad(summed, argnums=(0, 1))(x_BLM, at_rest)
            return loss, cotangent_BLM, {name: own[name] + more[name] for name in names}

        def before_it(_: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            return jnp.zeros((), jnp.float32), received_BLM, own

        with of_branch(self.program.logits):
            loss, cotangent_BLM, own = jax.lax.cond(self.is_last(turn), at_the_end, before_it, out_BLM)
        return loss, cotangent_BLM, {**gradients, **own}

    def into_the_embedding(self, cotangent_BLM: jax.Array, gradients: Params, turn: Turn) -> Params:
        """The gradients, in the first stage with that of the embedding added. ``cotangent_BLM``: of the stage's input."""

        def added(total_VM: jax.Array) -> jax.Array:
            with of_phase("recompute"):
                tokens_BL = self.rows_of(turn)["tokens"]
                _, pull = jax.vjp(lambda at_rest: embedded(tokens_BL, at_rest, self.links), self.weights[EMBEDDING])
            return total_VM + pull(cotangent_BLM)[0]

        with of_branch(self.program.embedding):
            total_VM = jax.lax.cond(self.is_first(turn), added, lambda total_VM: total_VM, gradients[EMBEDDING])
        return {**gradients, EMBEDDING: total_VM}

    def before_the_first_tick(self) -> Carry:
        """Zeros in the place of all that a tick carries."""
        batch, given = _of_microbatch((self.batch, self.given), 0)
        x_BLM = zeros_of(
            jax.eval_shape(lambda at_rest: embedded(batch["tokens"], at_rest, self.links), self.weights[EMBEDDING])
        )
        return Carry(
            received_BLM=x_BLM,
            received_cotangent_BLM=x_BLM,
            inputs_SNBLM=jnp.zeros((self.program.ticks.slots, self.program.layers, *x_BLM.shape), x_BLM.dtype),
            sums=Sums(
                loss=jnp.zeros((), jnp.float32),
                by_weight=jax.tree.map(jnp.zeros_like, dict(self.weights)),
                counts=_no_counts(x_BLM, given, self.params, self.stacks),
            ),
        )


def _of_microbatch(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), tree)


def _stacks(program: StageProgram, table: ModelTable, links: Links, rank: jax.Array | int) -> Sequence[StackOfStages]:
    stacks = {stack.name: stack for stack in table.architecture.stacks}
    return [
        StackOfStages(
            stack=stacks[rows.name],
            rows=rows,
            names=table.names_in(rows.name),
            counts_C=jnp.asarray(rows.counts(program.ranks), jnp.int32)[rank],
            architecture=table.architecture,
            links=links,
        )
        for rows in program.stacks
    ]


def _turns(planned: Sequence[Sequence[PlannedTurn]], rank: jax.Array | int) -> Turn:
    """The turns of this device, tick after tick along the leading dim."""

    def numbers(of_turn: str, dtype: jnp.dtype) -> jax.Array:
        return jnp.asarray([[getattr(turn, of_turn) for turn in turns] for turns in planned], dtype)[rank]

    return Turn(numbers("active", jnp.bool_), *(numbers(name, jnp.int32) for name in Turn._fields[1:]))


def _no_counts(
    x_BLM: jax.Array, given: FromInput, params: Params, stacks: Sequence[StackOfStages]
) -> Mapping[str, MoeCounts]:
    """Zeros for the counts of each stack with experts, with the rows of all of a device's chunks along the leading dim."""
    found = {}
    for one in stacks:
        at_rest = {name: params[name][0] for name in one.names}
        _, counts = jax.eval_shape(one.layer, x_BLM, at_rest, given)
        if counts is not None:
            rows = one.most * one.counts_C.shape[0]
            found[one.stack.name] = jax.tree.map(
                lambda leaf, rows=rows: jnp.zeros((rows, *leaf.shape), leaf.dtype), counts
            )
    return found


def _counted(total: MoeCounts, more: MoeCounts, turn: Turn, program: StageProgram) -> MoeCounts:
    """The counts of all of a device's layers, with those of the layers of one stage added."""

    def added(total: jax.Array, more: jax.Array) -> jax.Array:
        first = turn.chunk * (total.shape[0] // program.virtual)
        before = jax.lax.dynamic_slice_in_dim(total, first, more.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(total, before + more, first, 0)

    return jax.tree.map(added, total, more)
