"""The names of weights in published checkpoints, by their names in a layer: what families share."""

from __future__ import annotations

from collections.abc import Mapping

ENDS: Mapping[str, str] = {
    "embedding.tokens": "model.embed_tokens.weight",
    "residual.final_norm": "model.norm.weight",
    "logits.kernel": "lm_head.weight",
}
NORMS: Mapping[str, str] = {
    "residual.attention_norm": "input_layernorm.weight",
    "residual.feed_forward_norm": "post_attention_layernorm.weight",
}
GROUPED_QUERY_ATTENTION: Mapping[str, str] = {
    f"attention.{name}": f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")
}
FEED_FORWARD: Mapping[str, str] = {f"mlp.{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
