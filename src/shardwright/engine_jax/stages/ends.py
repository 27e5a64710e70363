"""What a stage has of a microbatch besides its layers: what follows from the input alone, the embedding, and the loss.

Where all stages share an end, all devices compute it together, in the tick in which the first stage begins with a microbatch or the last one
has its output.

B rows, L tokens, M embed, V vocabulary. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.pipeline.program import StageProgram
from shardwright.core.plan.plan import Phase
from shardwright.core.stages.units import Letter
from shardwright.engine_jax.attention.attention import mask_of
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.experts.moe import valid_tokens
from shardwright.engine_jax.io.layer_io import Links, LowPrecision, Params, Site
from shardwright.engine_jax.io.scopes import of_component, of_phase, of_tensor
from shardwright.engine_jax.layers.embedding import embed
from shardwright.engine_jax.layers.rotary import Angles
from shardwright.engine_jax.model.forward import at_the_end, loss_of
from shardwright.models.parts.architecture import Architecture

EMBEDDING = "embedding.tokens"
FINAL_NORM, LOGITS = "residual.final_norm", "logits.kernel"


class FromInput(NamedTuple):
    """What every layer needs of a microbatch's input. ``valid_BL``: tokens that are not padding; None without experts."""

    rotation: Angles
    mask: AttentionMask
    valid_BL: jax.Array | None


def from_input(batch: Mapping[str, jax.Array], architecture: Architecture, links: Links) -> FromInput:
    """``batch``: of one microbatch, sharded as the input."""
    with of_phase("forward"):
        rotation, mask = mask_of(batch["positions"], batch["segments"], architecture, links)
        with_experts = any(stack.experts for stack in architecture.stacks)
        return FromInput(rotation, mask, valid_tokens(batch["segments"], links) if with_experts else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two ends on one device. ``links``: of each."""

    program: StageProgram
    links: Mapping[Letter, Links]
    rank: jax.Array | int

    @classmethod
    def of(cls, program: StageProgram, links: Links, shared: Links | None, rank: jax.Array | int) -> Ends:
        """``links``: of what a device has of a stage; ``shared``: of the ends that all stages share."""
        letters: tuple[Letter, ...] = ("E", "L")
        return cls(
            program=program,
            links={end: shared if shared is not None and end in program.shared else links for end in letters},
            rank=rank,
        )

    def where_it_is(self, end: Letter, here_BLM: jax.Array, elsewhere_BLM: jax.Array) -> jax.Array:
        """One of the two: ``here_BLM`` on the device of the stage that an end is next to. Others come here only where they share it."""
        if end not in self.program.shared:
            return here_BLM
        return jnp.where(self.rank == self.program.place_of(end)[0], here_BLM, elsewhere_BLM)

    def to_all(self, end: Letter, x_BLM: jax.Array, phase: Phase) -> jax.Array:
        """What the stage has that an end is next to, on all devices that compute it."""
        if end not in self.program.shared:
            return x_BLM
        own_BLM = self.where_it_is(end, x_BLM, jnp.zeros_like(x_BLM))
        with of_component("residual"), of_tensor("residual.stream"), of_phase(phase):
            return jax.lax.psum(own_BLM, self.program.axes)


def embedded(tokens_BL: jax.Array, table_VM: jax.Array, links: Links) -> jax.Array:
    """The input of the first layer. ``table_VM``: the embedding at rest."""
    in_use_VM = links.use(EMBEDDING, table_VM)
    with of_component("embedding"):
        return embed(tokens_BL, in_use_VM, links)


def names_at_the_end(params: Params) -> tuple[str, ...]:
    """The weights with which the last stage computes its loss. A tied model uses the embedding for its logits."""
    return FINAL_NORM, LOGITS if LOGITS in params else EMBEDDING


def low_at_the_end(params: Params, links: Links) -> LowPrecision | None:
    """How the product of the logits is quantized."""
    return links.low.get(names_at_the_end(params)[-1])


def loss_at_the_end(
    x_BLM: jax.Array,
    params: Params,
    batch: Mapping[str, jax.Array],
    architecture: Architecture,
    links: Links,
    site: Site | None,
) -> jax.Array:
    """The loss, summed over a device's own valid tokens of a microbatch. ``x_BLM``: the output of the last layer. ``site``: of the
    microbatch, with the factors of the logits."""
    return loss_of(x_BLM, params, None, batch, architecture, at_the_end(links, site))
