"""SwiGLU feed-forward layers (arXiv:2002.05202): dense ones, and the shared experts, which process every token.

B rows, L tokens, M embed, F hidden units.
"""

from __future__ import annotations

from shardwright.core.program.draft import Draft
from shardwright.core.program.program import Value


def feed_forward(draft: Draft, normed: Value, name: str, width: int) -> Value:
    """What the layer adds to the residual stream. ``normed``: the normed stream; ``width``: hidden units."""
    mlp = draft.part(name, component="mlp")
    x = mlp.take(normed, "input")
    gate = mlp.product("B L M, M F -> B L F", x, "gate", "gate", F=width)
    up = mlp.product("B L M, M F -> B L F", x, "up", "up", F=width)
    hidden = mlp.gate(gate, up, "hidden", function="silu")
    return mlp.product("B L F, F M -> B L M", hidden, "down", "projected")
