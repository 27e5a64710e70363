"""The ticks of a step in stages: both passes of every microbatch, and the permutes between stages.

In a tick a device computes a forward pass of one microbatch and a backward pass of another, each of one of its stages, or waits. Then
it passes its output on to the next device, and the cotangent of its input back to the one before. JAX differentiates no tick: the
backward passes are steps of the same loop, so that only the inputs of live microbatches are kept.

B rows, L tokens, M embed, V vocabulary, S slots, N layers of a stage. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    """``links``: of the plan of the program. ``batch``: a device's rows of all microbatches, which are along the leading dim."""
    architecture = table.architecture
    rank = index_of(program.axes)
    params = {**weights, **buffers}
    stacks = _stacks(program, table, links, rank)
    ring = Ring.over(mesh, program.axes)
    back = Ring(axes=ring.axes, in_mesh_order=ring.in_mesh_order, numbers=ring.numbers[::-1])
    last = names_at_the_end(params)
    given_of_all = jax.lax.map(lambda one: from_input(one, architecture, links), batch)

    def microbatch(turn: Turn) -> tuple[Arrays, FromInput]:
        return jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, turn.microbatch, keepdims=False), (batch, given_of_all)
        )

    def tick(carry: Carry, turns: tuple[Turn, Turn]) -> tuple[Carry, None]:
        forward, backward = turns
        own, given = microbatch(forward)
        sums = carry.sums

        def embedding(_: jax.Array) -> jax.Array:
            with of_phase("forward"):
                return embedded(own["tokens"], params[EMBEDDING], links)

        begins = forward.active & (rank == 0) & (forward.chunk == 0)
        with of_branch(program.embedding):
            x_BLM = jax.lax.cond(begins, embedding, lambda received: received, carry.received_BLM)
        out = forward_pass(x_BLM, forward, given, params, carry.inputs_SNBLM, stacks)
        counts = {name: _counted(sums.counts[name], more, forward, program) for name, more in out.counts.items()}

        # The last stage has both passes of a microbatch in one tick.
        ends = backward.active & (rank == program.ranks - 1) & (backward.chunk == program.virtual - 1)
        own, given = microbatch(backward)

        def loss(x_BLM: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            def summed(x_BLM: jax.Array, at_the_end: Params) -> jax.Array:
                return loss_at_the_end(x_BLM, at_the_end, own, architecture, links)

            found, (cotangent_BLM, more) = jax.value_and_grad(summed, argnums=(0, 1))(
                x_BLM, {name: params[name] for name in last}
            )
            return found, cotangent_BLM, {name: sums.by_weight[name] + more[name] for name in last}

        def no_loss(_: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            return (
                jnp.zeros_like(sums.loss),
                carry.received_cotangent_BLM,
                {name: sums.by_weight[name] for name in last},
            )

        with of_branch(program.logits):
            found, cotangent_BLM, more = jax.lax.cond(ends, loss, no_loss, out.x_BLM)
        gradients = {**sums.by_weight, **more}
        cotangent_BLM, gradients = backward_pass(
            cotangent_BLM, backward, given, weights, buffers, out.inputs_SNBLM, gradients, stacks
        )

        def into_the_embedding(total_VM: jax.Array) -> jax.Array:
            with of_phase("recompute"):
                _, pull = jax.vjp(lambda table_VM: embedded(own["tokens"], table_VM, links), params[EMBEDDING])
            return total_VM + pull(cotangent_BLM)[0]

        begun = backward.active & (rank == 0) & (backward.chunk == 0)
        with of_branch(program.embedding):
            table_VM = jax.lax.cond(begun, into_the_embedding, lambda total: total, gradients[EMBEDDING])
        gradients = {**gradients, EMBEDDING: table_VM}

        with of_component("residual"), of_tensor("residual.stream"):
            with of_phase("forward"):
                received_BLM = passed_on(out.x_BLM, ring)
            with of_phase("backward"):
                received_cotangent_BLM = passed_on(cotangent_BLM, back)
        after = Sums(sums.loss + found, gradients, counts)
        return Carry(received_BLM, received_cotangent_BLM, out.inputs_SNBLM, after), None

    turns = _turns(program.ticks.forward, rank), _turns(program.ticks.backward, rank)
    first = jax.tree.map(lambda array: array[0], (batch, given_of_all))
    x_BLM = zeros_of(jax.eval_shape(lambda tokens: embedded(tokens, params[EMBEDDING], links), first[0]["tokens"]))
    begin = Carry(
        received_BLM=x_BLM,
        received_cotangent_BLM=x_BLM,
        inputs_SNBLM=jnp.zeros((program.ticks.slots, program.layers, *x_BLM.shape), x_BLM.dtype),
        sums=Sums(
            loss=jnp.zeros((), jnp.float32),
            by_weight=jax.tree.map(jnp.zeros_like, dict(weights)),
            counts=_no_counts(x_BLM, first[1], params, stacks),
        ),
    )
    after, _ = jax.lax.scan(tick, begin, turns)
    return after.sums


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
