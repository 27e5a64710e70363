"""The operations that a program is made of: a small closed set, each a dataclass with the numbers that it needs.

An operation knows no family and no tensor's name. What its backward pass reads is in ``READS``; what its cotangents are sums over is in
``sums.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.core.program.dims import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Tokens times a weight."""

    dims: Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMS norm (arXiv:1910.07467) over the last dim, times a scale."""

    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The sum with a weight of some of the value's dims."""

    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate:
    """Rotary position embedding (arXiv:2104.09864) of the last dim, by positions. ``rope``: its frequencies and its form."""

    rope: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """``function`` of the first input times the second (arXiv:2002.05202)."""

    function: Literal["silu"] = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Causal attention inside documents: softmax of the ``scale``-d scores of queries and keys, times values.

    ``window``: how many tokens a token attends to, itself included; None: all before it.
    """

    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A token's ``top_k`` experts, and their weights, from its scores. The fields are those of ``Experts`` of an architecture."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int
    chosen_groups: int
    normalized: bool
    scale: float
    capacity_factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One row for each of a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """The weighted sum of the outputs of a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """The row of a table for each id: a product with a one-hot vector, so a sum over the table's entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The cross-entropy of the scores of each token, summed over valid ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """The sum of values that lie alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A value times a constant."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """``limit * tanh(x / limit)``."""

    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Consecutive runs of the last dim, of these ``widths``."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Values one after the other along their last dims; one without heads is that of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The same value where another part needs it: resharded, and summed over what ``sums.py`` says.

    ``kind``: as of a ``Move`` of the table. ``renamed``: what its dim of tokens is called then.
    """

    kind: Literal["stream", "queries", "keys", "dispatch", "combine"]
    renamed: Mapping[str, str]


Primitive = (
    Product
    | Norm
    | Bias
    | Rotate
    | Gate
    | Attend
    | Route
    | Dispatch
    | Combine
    | Embed
    | Loss
    | Add
    | Scale
    | Cap
    | Split
    | Join
    | Take
)

NOT_LINEAR = (Norm, Gate, Attend, Route, Cap, Loss)
"""Operations that are wrong of one summand alone: their inputs are complete."""

READS: Mapping[type, Literal["inputs", "inputs and output"]] = {
    Product: "inputs",
    Norm: "inputs",
    Gate: "inputs",
    Attend: "inputs and output",
    Route: "inputs",
    Combine: "inputs",
    Cap: "inputs",
}
"""The activations that the backward pass through an operation reads; through any other, none."""
