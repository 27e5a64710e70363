"""The dtype of each computation, stored result, transfer and sum: one table for both engines, the plan's bytes and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.core.model.table import DTYPE_BYTES, Weight

Word = Literal["computation", "float32", "in use", "at rest", "narrower", "gradients", "moments"]
"""A dtype by its purpose: the computation's; always float32; a weight's in use, which is the computation's or its own; a
weight's at rest; the narrower of these two; that in which gradients are summed; the moments'."""

TRAINED_IN = ("float32", "bfloat16")
UNTRAINED = (
    "Nothing trains in float16: gradients below 6e-8 are 0 in it and those above 65,504 infinite, unless the loss is scaled, "
    "and no engine scales it. Use 'bfloat16', which has as many bits and float32's range."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of one kind of value, described by ``what``. None: it is not done.

    ``computed``: products, sums and functions on one device. ``kept``: the result, as it is returned and kept for the
    backward pass. ``sent``: what a collective sends. ``summed``: the sum of partial values of several devices, as the
    collective returns it; it may accumulate in a wider dtype.
    """

    what: str
    computed: Word | None
    kept: Word
    sent: Word | None = None
    summed: Word | None = None


PRECISION: Mapping[str, Precision] = {
    "weight": Precision(
        what="a weight, gathered for use",
        computed=None,
        kept="in use",
        sent="narrower",
    ),
    "stream": Precision(
        what="embedding rows, the residual stream and what is added to it",
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
        what="rotary embedding: the angles of positions, rotated queries and keys",
        computed="float32",
        kept="computation",
    ),
    "product": Precision(
        what="matrix products with weights: queries, keys, values, latents, outputs, those of each expert",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "hidden": Precision(
        what="hidden units: the SiLU of the gate, rounded, times the up-projection",
        computed="float32",
        kept="computation",
    ),
    "scores": Precision(
        what="attention scores, scaled and masked; their maxima and sums, also the running ones of a ring",
        computed="float32",
        kept="float32",
    ),
    "probabilities": Precision(
        what="attention probabilities before normalization: exp(score - maximum)",
        computed="float32",
        kept="computation",
    ),
    "attention": Precision(
        what="the output of attention, summed over all key blocks of a ring before it is rounded",
        computed="float32",
        kept="computation",
        sent="computation",
    ),
    "router": Precision(
        what="the router's products, scores, top-k, and the weights of the chosen experts",
        computed="float32",
        kept="float32",
        sent="float32",
        summed="float32",
    ),
    "combined": Precision(
        what="the weighted sum of the outputs of a token's experts",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "logits": Precision(
        what="logits over the vocabulary",
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
    "cotangent": Precision(
        what="cotangents of activations, except the router's; that of the logits is rounded before its products",
        computed="float32",
        kept="computation",
        sent="computation",
        summed="computation",
    ),
    "gradient": Precision(
        what="the gradient of one use of a weight in one microbatch; summed over both uses of a tied weight, microbatches and devices",
        computed="float32",
        kept="in use",
        sent="gradients",
        summed="gradients",
    ),
    "mean": Precision(
        what="the gradient divided by the number of tokens",
        computed="float32",
        kept="gradients",
    ),
    "clipping": Precision(
        what="the norm of all gradients, and the factor that clips them",
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
        what="a weight minus its update",
        computed="float32",
        kept="at rest",
    ),
}


def dtype_of(
    word: Word, *, computation: str = "", in_use: str = "", at_rest: str = "", gradients: str = "", moments: str = ""
) -> str:
    """The dtype that a word means, given the dtypes that it can refer to.

    >>> dtype_of("narrower", in_use="bfloat16", at_rest="float32"), dtype_of("float32", computation="bfloat16")
    ('bfloat16', 'float32')
    """
    if word == "narrower":
        return min(at_rest, in_use, key=DTYPE_BYTES.__getitem__)
    meant = {
        "computation": computation,
        "in use": in_use,
        "at rest": at_rest,
        "gradients": gradients,
        "moments": moments,
        "float32": "float32",
    }
    assert meant[word], word
    return meant[word]


def own_dtype(word: Word | None) -> str | None:
    """The ``dtype`` field of an activation in a model table: None means the computation's."""
    return None if word == "computation" else word


def in_use_dtype(weight: Weight, computation: str) -> str:
    """The dtype in which a weight is multiplied."""
    return weight.in_use_dtype or computation


def sent_dtype(weight: Weight, at_rest: str, computation: str) -> str:
    """The dtype in which a weight is gathered."""
    word = PRECISION["weight"].sent
    assert word is not None
    return dtype_of(word, at_rest=at_rest, in_use=in_use_dtype(weight, computation))


def summed_dtype(weight: Weight, gradients: str, computation: str) -> str:
    """The dtype in which partial gradients of a weight are sent and summed. ``gradients``: of the request."""
    word = PRECISION["gradient"].summed
    assert word is not None
    return dtype_of(word, gradients=gradients, in_use=in_use_dtype(weight, computation))
