"""The two ends of a decoder: the embedding, from tokens to the residual stream, and the logits with their loss."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.model.precision import PRECISION, own_dtype
from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Value
from shardwright.models.parts.architecture import Architecture

BATCH_FIELDS = ("tokens", "targets", "positions", "segments", "valid")
"""The fields of each token of a batch: its id, the next token's id, its position in its document, that document's number in
the row, and whether its loss counts."""
NO_DOCUMENT = 0
"""The segment of padding: tokens that belong to no document and are not routed to an expert."""


def batch_fields(draft: Draft) -> Mapping[str, Value]:
    """The fields of a batch by name."""
    return {name: draft.field(f"input.{name}", "B L", "bool" if name == "valid" else "int32") for name in BATCH_FIELDS}


def embedding(draft: Draft, batch: Mapping[str, Value]) -> Value:
    """The residual stream before the first layer."""
    embed, residual = draft.part("embedding"), draft.part("residual")
    ids = embed.take(batch["tokens"], "ids")
    return residual.take(embed.embed(ids, "tokens", "output"), "stream")


def logits_and_loss(draft: Draft, stream: Value, batch: Mapping[str, Value], architecture: Architecture) -> None:
    """From the last layer's output to the loss. Tied: the embedding is the weight of the logits too."""
    residual, logits = draft.part("residual"), draft.part("logits")
    targets, valid = logits.take(batch["targets"], "targets"), logits.take(batch["valid"], "valid")
    x = logits.take(residual.norm(stream, "final_norm", eps=architecture.norm_eps), "input")
    dtype = own_dtype(PRECISION["logits"].kept)
    if architecture.tied:
        scores = logits.product("B L M, V M -> B L V", x, "embedding.tokens", "scores", dtype=dtype)
    else:
        scores = logits.product("B L M, M V -> B L V", x, "kernel", "scores", dtype=dtype)
    logits.loss(scores, targets, valid)
