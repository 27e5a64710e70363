"""Multi-head latent attention (arXiv:2405.04434): devices exchange the latent, never the keys and values computed from it.

In DeepSeek-V3 a token's latent has 576 elements, its keys and values 40,960.

B rows, L tokens of a layer's input, T tokens of queries, S tokens of keys, M embed, H heads, D head dim of queries and keys, E of values,
Q compressed queries, R the latent: N compressed keys and values, then P of the rotary key.
"""

from __future__ import annotations

from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Value
from shardwright.models.layers.attention import Masks
from shardwright.models.parts.architecture import Architecture, LatentAttention


def latent_attention(
    draft: Draft, stream: Value, masks: Masks, architecture: Architecture, form: LatentAttention
) -> Value:
    """What attention adds to the residual stream."""
    residual, attention = draft.part("residual"), draft.part("attention")
    rope, eps = architecture.rope, architecture.latent_norm_eps
    x = attention.take(residual.norm(stream, "attention_norm", eps=architecture.norm_eps), "input")

    if form.q_lora is None:
        q = attention.product("B L M, M H D -> B L H D", x, "q")
    else:
        q = attention.product("B L M, M Q -> B L Q", x, "q_down", "query_latent")
        q = attention.product("B L Q, Q H D -> B L H D", attention.norm(q, "q_norm", eps=eps), "q_up")
    plain, rotary = attention.split(q, D=form.nope_dim, P=form.rope_dim)
    q = attention.join("B L H D", plain, attention.rotate(rotary, masks.positions, rope=rope), name="queries")
    q = attention.take(q, "queries_attended", "B T H D")

    latent = attention.product("B L M, M R -> B L R", x, "kv_down", "latent")
    compressed, rotary = attention.split(latent, N=form.kv_lora, P=form.rope_dim)
    compressed = attention.norm(compressed, "kv_norm", eps=eps)
    latent = attention.join("B L R", compressed, attention.rotate(rotary, masks.positions, rope=rope), like=latent)
    latent = attention.take(latent, "latent_attended", "B S R")
    compressed, rotary = attention.split(latent, N=form.kv_lora, P=form.rope_dim)
    both = attention.product("B S N, N H D -> B S H D", compressed, "kv_up", D=form.nope_dim + form.value_dim)
    plain, values = attention.split(both, D=form.nope_dim, E=form.value_dim)
    # The rotary key of a token is that of all heads.
    k = attention.join("B S H D", plain, rotary, name="keys_attended")
    v = attention.named(values, "values_attended")

    scale = form.head_dim**-0.5 * rope.score_factor
    a = attention.attend(q, k, v, "attended", masks=masks.attended, scale=scale)
    a = attention.take(a, "output", "B L H E")
    return attention.product("B L H E, H E M -> B L M", a, "o", "projected")
