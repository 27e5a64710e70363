"""The tensors of a model that the core asks for, by what they are in its program. They follow from its operations (``core/program/names.py``)."""

from __future__ import annotations

from dataclasses import dataclass

STREAM = "residual.stream"
"""The residual stream: what every layer gets and gives. It is a word of the notation of policies, so it has one name in all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of activations and weights as in the table, weights as in a layer. Empty: the model has no such tensor, as a user's own program,
    of which no operation is known.

    Of the ends: ``embedded``, the rows of the embedding; ``logits_input``, what the logits are made of; ``scores``, over the vocabulary.

    Of a layer: ``between``, the stream between its parts; ``normed``, what its parts get of a norm; ``summands``, what is added to the
    stream; ``rotated``, what has a rotary embedding; ``latents``, what is normed inside of attention; ``hidden``, what gates make.

    Of attention: ``queries`` where they are made; ``queries_attended``, ``keys_attended`` and ``values_attended`` where they are attended to;
    ``attended``, its result; ``query_positions`` and ``key_positions`` of its mask. ``made_from_taken``: keys and values that are made
    where they are attended to. ``of_a_ring``: what each step of a ring has of its own, and the result.

    Of experts: ``tokens`` with their experts and weights as they are sent, ``token_experts`` and ``token_weights``; ``dispatched``, a row for
    each expert of a token; ``received``, the rows where experts are; ``expert_hidden`` and ``expert_outputs`` of these; ``returned``, the
    rows where tokens are; ``combined``, their sum. ``reading_weights``: those that received rows are multiplied with;
    ``output_weights``: those that make the outputs.
    """

    embedded: str = ""
    logits_input: str = ""
    scores: str = ""

    between: frozenset[str] = frozenset()
    normed: frozenset[str] = frozenset()
    summands: frozenset[str] = frozenset()
    rotated: frozenset[str] = frozenset()
    latents: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()

    queries: str = ""
    queries_attended: str = ""
    keys_attended: str = ""
    values_attended: str = ""
    attended: str = ""
    query_positions: str = ""
    key_positions: str = ""
    made_from_taken: frozenset[str] = frozenset()
    of_a_ring: frozenset[str] = frozenset()

    tokens: str = ""
    token_experts: str = ""
    token_weights: str = ""
    dispatched: str = ""
    received: str = ""
    expert_hidden: str = ""
    expert_outputs: str = ""
    returned: str = ""
    combined: str = ""
    reading_weights: tuple[str, ...] = ()
    output_weights: tuple[str, ...] = ()


NO_NAMES = TensorNames()
"""Of a user's own program."""
