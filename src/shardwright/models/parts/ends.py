"""Rows of the two ends of a decoder: the embedding, from tokens to the residual stream, and the logits."""

from __future__ import annotations

from shardwright.core.model.precision import PRECISION, own_dtype
from shardwright.core.model.table import Activation, Move, Weight
from shardwright.models.parts.architecture import Architecture
from shardwright.models.parts.rows import TableRows, kernel, norm, num_layers, over_tokens

TOKENS = ("batch", "length")
STREAM = ("batch", "length", "embed")
BATCH_FIELDS = ("tokens", "targets", "positions", "segments", "valid")
"""The fields of each token of a batch: its id, the next token's id, its position in its document, that document's number in
the row, and whether its loss counts."""
NO_DOCUMENT = 0
"""The segment of padding: tokens that belong to no document and are not routed to an expert."""


def ends(architecture: Architecture) -> TableRows:
    """Embedding, residual stream, final norm and logits. Tied: one weight, used in both components."""
    num = num_layers(architecture.stacks)

    def integers(name: str, component: str, *logical_axes: str) -> Activation:
        dtype = "bool" if name.endswith(".valid") else "int32"
        return Activation(name=name, component=component, logical_axes=logical_axes, dtype=dtype)

    return TableRows(
        weights=(*_kernels(architecture), _final_norm(architecture)),
        activations=(
            *(integers(f"input.{what}", "input", *TOKENS) for what in BATCH_FIELDS),
            integers("embedding.ids", "embedding", *TOKENS),
            Activation(name="embedding.output", component="embedding", logical_axes=STREAM),
            Activation(name="residual.stream", component="residual", logical_axes=STREAM, num=num),
            *(integers(f"logits.{what}", "logits", *TOKENS) for what in ("targets", "valid")),
            Activation(name="logits.input", component="logits", logical_axes=STREAM),
            Activation(
                name="logits.scores",
                component="logits",
                logical_axes=("batch", "length", "vocab"),
                dtype=own_dtype(PRECISION["logits"].kept),
            ),
        ),
        moves=(
            Move(source="input.tokens", target="embedding.ids"),
            *(Move(source=f"input.{what}", target=f"logits.{what}") for what in ("targets", "valid")),
            Move(source="embedding.output", target="residual.stream", summed=(("embedding", "vocab"),)),
            Move(source="residual.stream", target="logits.input", feeds=(("logits", "vocab"),)),
        ),
    )


def _kernels(architecture: Architecture) -> tuple[Weight, ...]:
    vocab, embed = {"vocab": architecture.vocab}, {"embed": architecture.embed}
    embedding = kernel(
        architecture,
        None,
        "embedding.tokens",
        "embedding",
        {**vocab, **embed},
        torch_dims=(("vocab",), ("embed",)),
        storage=("embed", "vocab"),
        contracted=(*over_tokens("embedding"), *(over_tokens("logits") if architecture.tied else ())),
        hugging_face="model.embed_tokens.weight",
        uses=("logits",) if architecture.tied else (),
    )
    if architecture.tied:
        return (embedding,)
    logits = kernel(
        architecture,
        None,
        "logits.kernel",
        "logits",
        {**embed, **vocab},
        torch_dims=(("vocab",), ("embed",)),
        storage=("embed", "vocab"),
        contracted=over_tokens("logits"),
        hugging_face="lm_head.weight",
    )
    return embedding, logits


def _final_norm(architecture: Architecture) -> Weight:
    return norm(
        None, "residual.final_norm", "residual", architecture.embed, over_tokens("residual"), "model.norm.weight"
    )
