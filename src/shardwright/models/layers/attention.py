"""Grouped-query attention (arXiv:2305.13245): devices exchange keys and values.

B rows, L tokens of a layer's input, T tokens of queries, S tokens of keys, M embed, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Value
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Positions in documents, and positions and segments of queries and of keys, from which all layers make their mask."""

    positions: Value
    attended: tuple[Value, ...]


def masks(draft: Draft, batch: Mapping[str, Value]) -> Masks:
    """Made once a step, for all layers."""
    attention = draft.part("attention")
    fields = {name: attention.take(batch[name], name) for name in ("positions", "segments")}
    return Masks(
        positions=fields["positions"],
        attended=tuple(
            attention.take(field, f"{side}_{name}", dims)
            for side, dims in (("q", "B T"), ("kv", "B S"))
            for name, field in fields.items()
        ),
    )


def grouped_query_attention(
    draft: Draft, stream: Value, masks: Masks, architecture: Architecture, form: GroupedQueryAttention
) -> Value:
    """What attention adds to the residual stream."""
    residual, attention = draft.part("residual"), draft.part("attention")
    x = attention.take(residual.norm(stream, "attention_norm", eps=architecture.norm_eps), "input")

    q = attention.product("B L M, M H D -> B L H D", x, "q")
    q = attention.rotate(q, masks.positions, "queries", rope=architecture.rope)
    k = attention.product("B L M, M K D -> B L K D", x, "k")
    k = attention.rotate(k, masks.positions, "keys", rope=architecture.rope)
    v = attention.product("B L M, M K D -> B L K D", x, "v", "values")

    q = attention.take(q, "queries_attended", "B T H D")
    k = attention.take(k, "keys_attended", "B S K D")
    v = attention.take(v, "values_attended", "B S K D")
    a = attention.attend(q, k, v, "attended", masks=masks.attended, scale=form.head_dim**-0.5, window=form.window)
    a = attention.take(a, "output", "B L H D")
    return attention.product("B L H D, H D M -> B L M", a, "o", "projected")
