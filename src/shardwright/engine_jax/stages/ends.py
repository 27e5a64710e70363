"""What a stage has of a microbatch besides its layers: the embedding, and the loss.

Where all stages share an end, all devices compute it together, in the tick in which the first stage begins with a microbatch or the last one
has its output.

B rows, L tokens, M embed, V vocabulary. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardwright.core.pipeline.program import StageProgram
from shardwright.core.plan.plan import Phase
from shardwright.core.policies.policy import INPUT
from shardwright.core.program.walk import Walk, weights_in
from shardwright.core.stages.units import Letter
from shardwright.engine_jax.io.layer_io import Links, LowPrecision
from shardwright.engine_jax.io.scopes import of_component, of_phase, of_tensor


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
        with of_component("residual"), of_tensor(INPUT), of_phase(phase):
            return jax.lax.psum(own_BLM, self.program.axes)


def low_at_the_end(walk: Walk, links: Links) -> LowPrecision | None:
    """How the product of the logits is quantized."""
    return links.low.get(weights_in(walk.after)[-1])
