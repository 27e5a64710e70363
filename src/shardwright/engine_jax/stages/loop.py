"""The ticks of a step in stages: both passes of every microbatch, and the permutes between stages.

In a tick a device computes a forward pass of one microbatch and a backward pass of another, each of one of its stages, or waits. Then
it passes its output on to the next device, and the cotangent of its input back to the one before. JAX differentiates no tick: the
backward passes are steps of the same loop, so that only the inputs of live microbatches are kept.

B rows, L tokens, M embed, V vocabulary, S slots, N layers of a stage, C chunks of a device. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.pipeline.program import StageProgram
from shardwright.core.policies.policy import INPUT
from shardwright.core.program.walk import Walk, weights_in
from shardwright.engine_jax.experts.experts import MoeCounts
from shardwright.engine_jax.io.layer_io import Links, Params, Ring, Site, index_of
from shardwright.engine_jax.io.redistribute import passed_on
from shardwright.engine_jax.io.scopes import of_branch, of_component, of_phase, of_tensor
from shardwright.engine_jax.model.ends import at_the_end as at_the_end_of
from shardwright.engine_jax.model.ends import embedded, loss_of
from shardwright.engine_jax.model.prepared import prepare
from shardwright.engine_jax.stages.branches import zeros_of
from shardwright.engine_jax.stages.ends import Ends, low_at_the_end
from shardwright.engine_jax.stages.gathered import kept_gathered, scattered_once
from shardwright.engine_jax.stages.kept import Live, arrays_to_keep
from shardwright.engine_jax.stages.passes import Prepared, StackOfStages, backward_pass, forward_pass
from shardwright.engine_jax.stages.turns import EndTurns, Turn, no_turn, turns_of, turns_of_ends
from shardwright.models.layers.decoder import walk_of

Arrays = Mapping[str, jax.Array]


class Sums(NamedTuple):
    """Of a step, on one device: the loss and the gradients, summed over its own tokens; the counts of the experts, by stack, with
    the layers of its stages along the leading dim; and the amaxes, by the names of delayed scales."""

    loss: jax.Array
    by_weight: Params
    counts: Mapping[str, MoeCounts]
    amaxes: Params


class Carry(NamedTuple):
    """Between two ticks: what the neighbours sent, what is kept, and the sums."""

    received_BLM: jax.Array
    received_cotangent_BLM: jax.Array
    live: Live
    sums: Sums


def sums_of_stages(
    program: StageProgram,
    mesh: Mesh,
    table: ModelTable,
    links: Links,
    shared: Links | None,
    weights: Params,
    buffers: Params,
    batch: Arrays,
    site: Site | None = None,
) -> Sums:
    """``links``: of the plan of the program; ``shared``: of that of the ends that all stages share. ``batch``: a device's rows, of each microbatch along the leading dim. ``site``: of the step, with
    the factors of all of the device's layers; None: no product is quantized."""
    rank, at_rest = index_of(program.axes), weights
    weights, links = kept_gathered(weights, links)
    # Masks need collectives of their own, and are those of all stages of a device: they are made once.
    walk = walk_of(table.architecture)
    with of_phase("forward"):
        given = jax.lax.map(lambda one: prepare(one, walk, links), batch)
    device = _Device(
        program=program,
        walk=walk,
        links=links,
        ends=Ends.of(program, links, shared, rank),
        rank=rank,
        weights=weights,
        buffers=buffers,
        batch=batch,
        site=site,
        given=given,
        stacks=_stacks(program, table, links, rank),
    )
    ring = Ring.over(mesh, program.axes)
    back = replace(ring, numbers=ring.numbers[::-1])

    def tick(carry: Carry, turns: tuple[Turn, Turn, EndTurns]) -> tuple[Carry, None]:
        forward, backward, ends = turns
        sums = carry.sums
        x_BLM = device.stage_input(carry.received_BLM, ends.embedding)
        out = forward_pass(
            x_BLM,
            forward,
            device.given_of(forward),
            weights,
            buffers,
            device.site_of(forward),
            carry.live,
            device.stacks,
        )
        # The last stage has both passes of a microbatch in one tick.
        loss, cotangent_BLM, gradients, amaxes = device.stage_cotangent(
            carry.received_cotangent_BLM, out.x_BLM, (sums.by_weight, sums.amaxes), ends.logits
        )
        cotangent_BLM, gradients, amaxes = backward_pass(
            cotangent_BLM,
            backward,
            device.given_of(backward),
            weights,
            buffers,
            device.site_of(backward),
            out.live,
            (gradients, amaxes),
            device.stacks,
        )
        gradients = device.into_the_embedding(cotangent_BLM, gradients, ends.embedding_gradient)
        counts = {name: _counted(sums.counts[name], more, forward, program) for name, more in out.counts.items()}
        with of_component("residual"), of_tensor(INPUT):
            with of_phase("forward"):
                received_BLM = passed_on(out.x_BLM, ring)
            with of_phase("backward"):
                received_cotangent_BLM = passed_on(cotangent_BLM, back)
        after = Sums(sums.loss + loss, gradients, counts, amaxes)
        return Carry(received_BLM, received_cotangent_BLM, out.live, after), None

    forward, backward = (turns_of(planned, rank) for planned in (program.ticks.forward, program.ticks.backward))
    turns = forward, backward, turns_of_ends(program, rank)
    after, _ = jax.lax.scan(tick, device.before_the_first_tick(), turns)
    return after.sums._replace(by_weight=scattered_once(after.sums.by_weight, at_rest, links))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """What a device has in a step: its weights at rest, and of each microbatch its rows and what follows from them."""

    program: StageProgram
    walk: Walk
    links: Links
    ends: Ends
    rank: jax.Array | int
    weights: Params
    buffers: Params
    batch: Arrays
    site: Site | None
    given: Prepared
    stacks: Sequence[StackOfStages]

    @property
    def params(self) -> Params:
        return {**self.weights, **self.buffers}

    def rows_of(self, turn: Turn) -> Arrays:
        return _of_microbatch(self.batch, turn.microbatch)

    def given_of(self, turn: Turn) -> Prepared:
        return _of_microbatch(self.given, turn.microbatch)

    def site_of(self, turn: Turn) -> Site | None:
        return None if self.site is None else self.site._replace(microbatch=turn.microbatch)

    @property
    def factors(self) -> Params:
        """Of delayed scales, those of all of the device's layers and of the logits."""
        return {} if self.site is None else self.site.factors

    @property
    def embedding_at_rest(self) -> Params:
        return {name: self.weights[name] for name in weights_in(self.walk.before)}

    def embedded(self, batch: Arrays, at_rest: Params) -> jax.Array:
        """The input of the first layer. ``at_rest``: the weights that make it."""
        return embedded(batch, at_rest, self.walk, self.ends.links["E"], twice=False).x_BLM

    def stage_input(self, received_BLM: jax.Array, turn: Turn) -> jax.Array:
        """What the stage before has sent, or in the first stage the embedding. ``turn``: of the embedding."""

        def embedding(received_BLM: jax.Array) -> jax.Array:
            with of_phase("forward"):
                x_BLM = self.embedded(self.rows_of(turn), self.embedding_at_rest)
            return self.ends.where_it_is("E", x_BLM, received_BLM)

        with of_branch(self.program.embedding):
            return jax.lax.cond(turn.active, embedding, lambda received_BLM: received_BLM, received_BLM)

    def stage_cotangent(
        self, received_BLM: jax.Array, out_BLM: jax.Array, before: tuple[Params, Params], turn: Turn
    ) -> tuple[jax.Array, jax.Array, Params, Params]:
        """The loss of a microbatch, the cotangent of the stage's output, the gradients with those of the final norm and the logits
        added, and the amaxes with theirs. In the last stage that follows from its output; in all others it is what the stage behind has
        sent, and 0 is added. ``before``: gradients and amaxes. ``turn``: of the logits."""
        gradients, amaxes = before
        links = self.ends.links["L"]
        names, low = weights_in(self.walk.after), low_at_the_end(self.walk, links)
        own = {name: gradients[name] for name in names}
        largest = {name: amaxes[name] for name in sorted({*low.delayed.values()} if low else ())}
        site = self.site_of(turn)

        def summed(x_BLM: jax.Array, at_the_end: Params, factors: Params) -> jax.Array:
            here = None if site is None else site._replace(factors=factors)
            return loss_of(x_BLM, at_the_end, {}, self.rows_of(turn), self.walk, at_the_end_of(links, here))

        def at_the_end(x_BLM: jax.Array) -> tuple[jax.Array, jax.Array, Params, Params]:
            x_BLM = self.ends.to_all("L", x_BLM, "forward")
            at_rest = {name: self.weights[name] for name in names}
            factors = {name: self.factors[name] for name in largest}
            loss, (cotangent_BLM, more, found) = jax.value_and_grad(summed, argnums=(0, 1, 2))(x_BLM, at_rest, factors)
            of_step = {name: jnp.maximum(largest[name], found[name]) for name in largest}
            cotangent_BLM = self.ends.where_it_is("L", cotangent_BLM, received_BLM)
            return loss, cotangent_BLM, {name: own[name] + more[name] for name in names}, of_step

        def before_it(_: jax.Array) -> tuple[jax.Array, jax.Array, Params, Params]:
            return jnp.zeros((), jnp.float32), received_BLM, own, largest

        with of_branch(self.program.logits):
            loss, cotangent_BLM, own, largest = jax.lax.cond(turn.active, at_the_end, before_it, out_BLM)
        return loss, cotangent_BLM, {**gradients, **own}, {**amaxes, **largest}

    def into_the_embedding(self, cotangent_BLM: jax.Array, gradients: Params, turn: Turn) -> Params:
        """The gradients, in the first stage with that of the embedding added. ``cotangent_BLM``: of the stage's input. ``turn``: of the
        embedding's backward pass."""

        def added(total: Params) -> Params:
            of_output_BLM = self.ends.to_all("E", cotangent_BLM, "backward")
            with of_phase("recompute"):
                batch = self.rows_of(turn)
                _, pull = jax.vjp(lambda at_rest: self.embedded(batch, at_rest), self.embedding_at_rest)
            (more,) = pull(of_output_BLM)
            return {name: total[name] + more[name] for name in total}

        own = {name: gradients[name] for name in self.embedding_at_rest}
        with of_branch(self.program.embedding):
            total = jax.lax.cond(turn.active, added, lambda total: total, own)
        return {**gradients, **total}

    def before_the_first_tick(self) -> Carry:
        """Zeros in the place of all that a tick carries."""
        batch, given = _of_microbatch((self.batch, self.given), 0)
        x_BLM = zeros_of(jax.eval_shape(partial(self.embedded, batch), self.embedding_at_rest))
        return Carry(
            received_BLM=x_BLM,
            received_cotangent_BLM=x_BLM,
            live=self.no_live(x_BLM, given),
            sums=Sums(
                loss=jnp.zeros((), jnp.float32),
                by_weight={
                    name: jnp.zeros_like(one, dtype=self.links.kept.get(name)) for name, one in self.weights.items()
                },
                counts=_no_counts(x_BLM, given, self.params, self.site_of(no_turn()), self.stacks),
                amaxes=jax.tree.map(jnp.zeros_like, dict(self.factors)),
            ),
        )

    def no_live(self, x_BLM: jax.Array, given: Prepared) -> Live:
        """Zeros for all slots."""
        slots = self.program.ticks.slots
        kept = {
            one.stack.name: [
                jnp.zeros((slots, one.most, *each.shape), each.dtype) for each in self.arrays_of(one, x_BLM, given)
            ]
            for one in self.stacks
        }
        return Live(jnp.zeros((slots, self.program.layers, *x_BLM.shape), x_BLM.dtype), kept)

    def arrays_of(
        self, one: StackOfStages, x_BLM: jax.Array, given: Prepared
    ) -> Sequence[jax.Array | jax.ShapeDtypeStruct]:
        """The arrays that a layer of a stack keeps besides its input."""
        if not one.keeps_more:
            return []
        run, first = one.rows.runs[0], jnp.int32(0)
        own, frozen = ({name: of[name][0] for name in one.names if name in of} for of in (self.weights, self.buffers))
        site = one.site_of(self.site_of(no_turn()), run, no_turn(), first)
        places = one.places(x_BLM, own, frozen, given, run, site)
        return jax.eval_shape(
            lambda x_BLM: arrays_to_keep(one.differentiated(x_BLM, own, frozen, given, run, site)[2], places), x_BLM
        )


def _of_microbatch(tree: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), tree)


def _stacks(program: StageProgram, table: ModelTable, links: Links, rank: jax.Array | int) -> Sequence[StackOfStages]:
    walk = walk_of(table.architecture)
    stacks = {stack.name: stack for stack in walk.program.stacks}
    return [
        StackOfStages(
            stack=stacks[rows.name],
            rows=rows,
            names=table.names_in(rows.name),
            counts_C=jnp.asarray(rows.counts(program.ranks), jnp.int32)[rank],
            firsts_C=jnp.asarray(rows.firsts(program.ranks), jnp.int32)[rank],
            walk=walk,
            links=links,
        )
        for rows in program.stacks
    ]


def _no_counts(
    x_BLM: jax.Array, given: Prepared, params: Params, site: Site | None, stacks: Sequence[StackOfStages]
) -> Mapping[str, MoeCounts]:
    """Zeros for the counts of each stack with experts, with the rows of all of a device's chunks along the leading dim."""
    found = {}
    for one in stacks:
        at_rest, run = {name: params[name][0] for name in one.names}, one.rows.runs[0]
        here = one.site_of(site, run, no_turn(), jnp.int32(0))
        _, counts = jax.eval_shape(partial(one.layer, run=run), x_BLM, at_rest, given, site=here)
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
