"""Which dtype is computed in, kept, sent and summed in: one table, which both engines, the plan's bytes and the docs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.core.model.table import DTYPE_BYTES, Weight

Word = Literal["computation", "float32", "in use", "at rest", "narrower", "moments"]
"""A dtype by what it is: the computation's; always float32; the one that a weight is used in, the computation's or its own; the
one that it rests in; the narrower of these two; the moments'."""

TRAINED_IN = ("float32", "bfloat16")
UNTRAINED = (
    "Nothing trains in float16: gradients below 6e-8 are 0 in it and those above 65,504 infinite, unless the loss is scaled, "
    "and no engine scales it. Use 'bfloat16', which has as many bits and float32's range."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``computed``: each product, sum and function on one device. ``kept``: the result as it is given on, and kept for the
    backward pass. ``sent``: what crosses links. ``summed``: the parts of several devices; a collective gives the sum in it,
    and may be more exact inside. None: that is not done.
    """

    what: str
    computed: Word | None
    kept: Word
    sent: Word | None = None
    summed: Word | None = None


PRECISION: Mapping[str, Precision] = {
    "weight": Precision(
        what="a weight, brought into use",
        computed=None,
        kept="in use",
        sent="narrower",
    ),
    "stream": Precision(
        what="rows of the embedding, the residual stream and what is added to it",
        computed="computation",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "norm": Precision(
        what="a norm: mean square, root and scale",
        computed="float32",
        kept="computation",
    ),
    "rotation": Precision(
        what="angles of positions, and queries and keys turned by them",
        computed="float32",
        kept="computation",
    ),
    "product": Precision(
        what="products with weights: queries, keys, values, latents, outputs, each expert's own",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "hidden": Precision(
        what="hidden units: the gate's silu, rounded, times the other product",
        computed="float32",
        kept="computation",
    ),
    "scores": Precision(
        what="products of queries and keys, scaled and masked; their maxima and sums, a ring's running ones too",
        computed="float32",
        kept="float32",
    ),
    "shares": Precision(
        what="e to the scores less their maximum: a query's shares of values, before they are divided by their sum",
        computed="float32",
        kept="computation",
    ),
    "attended": Precision(
        what="what queries take of values: summed over all pieces of a ring, then given on",
        computed="float32",
        kept="computation",
        sent="computation",
    ),
    "router": Precision(
        what="the router's products, scores, choices, and the weights of chosen experts",
        computed="float32",
        kept="float32",
        sent="float32",
        summed="float32",
    ),
    "combined": Precision(
        what="what a token's experts made of it, weighed and summed",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "logits": Precision(
        what="scores of the vocabulary",
        computed="float32",
        kept="float32",
    ),
    "loss": Precision(
        what="maxima, sums of exponentials and the loss",
        computed="float32",
        kept="float32",
        sent="float32",
        summed="float32",
    ),
    "slope": Precision(
        what="gradients of activations but the router's; the logits' before it is multiplied",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "gradient": Precision(
        what="the gradient of one use of a weight in one microbatch; both uses of a tied one, microbatches and devices are summed",
        computed="float32",
        kept="in use",
        sent="at rest",
        summed="at rest",
    ),
    "mean": Precision(
        what="the gradient over the count of tokens",
        computed="float32",
        kept="at rest",
    ),
    "clipping": Precision(
        what="the norm of all gradients, and what they are multiplied with",
        computed="float32",
        kept="float32",
        sent="float32",
        summed="float32",
    ),
    "moments": Precision(
        what="both moments of a gradient",
        computed="float32",
        kept="moments",
    ),
    "update": Precision(
        what="a weight less its update",
        computed="float32",
        kept="at rest",
    ),
}


def dtype_of(word: Word, *, computation: str = "", in_use: str = "", at_rest: str = "", moments: str = "") -> str:
    """The dtype that a word means where these are known.

    >>> dtype_of("narrower", in_use="bfloat16", at_rest="float32"), dtype_of("float32", computation="bfloat16")
    ('bfloat16', 'float32')
    """
    if word == "narrower":
        return min(at_rest, in_use, key=DTYPE_BYTES.__getitem__)
    meant = {"computation": computation, "in use": in_use, "at rest": at_rest, "moments": moments, "float32": "float32"}
    assert meant[word], word
    return meant[word]


def own_dtype(word: Word | None) -> str | None:
    """The dtype of a row of a model's table: None where it is the computation's, whatever that is."""
    return None if word == "computation" else word


def in_use_dtype(weight: Weight, computation: str) -> str:
    """The dtype in which a weight is multiplied."""
    return weight.in_use_dtype or computation


def sent_dtype(weight: Weight, at_rest: str, computation: str) -> str:
    """The dtype in which a weight is gathered."""
    word = PRECISION["weight"].sent
    assert word is not None
    return dtype_of(word, at_rest=at_rest, in_use=in_use_dtype(weight, computation))


def summed_dtype(weight: Weight, at_rest: str, computation: str) -> str:
    """The dtype in which parts of a weight's gradient are sent and summed."""
    word = PRECISION["gradient"].summed
    assert word is not None
    return dtype_of(word, at_rest=at_rest, in_use=in_use_dtype(weight, computation))
