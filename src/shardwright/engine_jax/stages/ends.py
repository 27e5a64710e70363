"""What a stage has of a microbatch besides its layers: what follows from the input alone, the embedding, and the loss.

B rows, L tokens, M embed, V vocabulary. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

from shardwright.engine_jax.attention.attention import mask_of
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.experts.moe import valid_tokens
from shardwright.engine_jax.io.layer_io import Links, Params
from shardwright.engine_jax.io.scopes import of_component, of_phase
from shardwright.engine_jax.layers.embedding import embed
from shardwright.engine_jax.layers.rotary import Angles
from shardwright.engine_jax.model.forward import loss_of, scores
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


def embedded(tokens_BL: jax.Array, table_VM: jax.Array, links: Links) -> jax.Array:
    """The input of the first layer. ``table_VM``: the embedding at rest."""
    in_use_VM = links.use(EMBEDDING, table_VM)
    with of_component("embedding"):
        return embed(tokens_BL, in_use_VM, links)


def names_at_the_end(params: Params) -> tuple[str, ...]:
    """The weights with which the last stage computes its loss. A tied model uses the embedding for its logits."""
    return FINAL_NORM, LOGITS if LOGITS in params else EMBEDDING


def loss_at_the_end(
    x_BLM: jax.Array,
    params: Params,
    batch: Mapping[str, jax.Array],
    architecture: Architecture,
    links: Links,
) -> jax.Array:
    """The loss, summed over a device's own valid tokens of a microbatch. ``x_BLM``: the output of the last layer."""
    return loss_of(scores(x_BLM, params, None, architecture, links), batch, links)
