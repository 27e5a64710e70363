"""When a device computes what: its turns, tick after tick, as the core has planned them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.pipeline.program import StageProgram
from shardwright.core.schedules.ticks import Turn as PlannedTurn
from shardwright.core.stages.units import Letter


class Turn(NamedTuple):
    """What this device computes in a tick: scalars, as in ``core/schedules/ticks.py``."""

    active: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array


class EndTurns(NamedTuple):
    """When this device computes the ends: where a stage has an end, the device of that stage; else all devices in the same ticks."""

    embedding: Turn
    embedding_gradient: Turn
    logits: Turn


def no_turn() -> Turn:
    """The turn of a device that waits."""
    return Turn(jnp.bool_(False), *(jnp.int32(0) for _ in Turn._fields[1:]))


def turns_of(planned: Sequence[Sequence[PlannedTurn]], rank: jax.Array | int) -> Turn:
    """The turns of this device, tick after tick along the leading dim."""

    def numbers(of_turn: str, dtype: jnp.dtype) -> jax.Array:
        return jnp.asarray([[getattr(turn, of_turn) for turn in turns] for turns in planned], dtype)[rank]

    return Turn(numbers("active", jnp.bool_), *(numbers(name, jnp.int32) for name in Turn._fields[1:]))


def turns_of_ends(program: StageProgram, rank: jax.Array | int) -> EndTurns:
    """The same of the ends: those of the first stage and of the last one."""

    def at(end: Letter, planned: Sequence[Sequence[PlannedTurn]]) -> Turn:
        owner, chunk = program.place_of(end)
        turns = turns_of(planned, owner if end in program.shared else rank)
        here = (turns.chunk == chunk) & (end in program.shared or rank == owner)
        return turns._replace(active=turns.active & here)

    ticks = program.ticks
    return EndTurns(
        embedding=at("E", ticks.forward), embedding_gradient=at("E", ticks.backward), logits=at("L", ticks.backward)
    )
