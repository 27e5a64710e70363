"""MaxText's sharding annotations: the logical names of each weight and of each constrained activation.

Taken from AI-Hypercomputer/maxtext e591f30cb (August 2026): llama, mixtral and deepseek decoders, in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MoePath = Literal["capacity", "dropless", "sparse"]
"""The MoE path: with a capacity, dropless by dense matmuls, or by the sparse kernels."""

WEIGHTS: dict[str, tuple[str | None, ...]] = {
    "embedding.tokens": ("vocab", "embed_vocab"),
    "logits.kernel": ("embed_vocab", "vocab"),
    "residual.final_norm": ("norm",),
    "residual.attention_norm": ("norm",),
    "residual.feed_forward_norm": ("norm",),
    "attention.q": ("embed", "q_heads", "kv"),
    "attention.k": ("embed", "kv_heads", "kv_head_dim"),
    "attention.v": ("embed", "kv_heads", "kv_head_dim"),
    "attention.o": ("heads", "kv", "embed"),
    "attention.q_down": ("embed", "q_lora_up_proj"),
    "attention.q_norm": ("norm",),
    "attention.q_up": ("q_lora", "q_heads", "kv"),
    "attention.kv_down": ("embed", "kv_lora_up_proj"),
    "attention.kv_norm": ("norm",),
    "attention.kv_up": ("kv_lora", "kv_heads", "kv_head_dim"),
    "mlp.gate": ("embed", "mlp"),
    "mlp.up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
    "shared.gate": ("embed", "mlp"),
    "shared.up": ("embed", "mlp"),
    "shared.down": ("mlp", "embed"),
    "router.kernel": ("embed", None),
    "router.bias": (None,),
    "moe.gate": ("exp", "embed_moe", "mlp_moe"),
    "moe.up": ("exp", "embed_moe", "mlp_moe"),
    "moe.down": ("exp", "mlp_moe", "embed_moe"),
}
"""By our name of a weight without its stack. Stacked layers have the name of the stack as first dim: ``layers``."""

WITH_SHARED_EXPERTS: dict[str, tuple[str | None, ...]] = {"router.kernel": ("embed_moe", None)}
"""Weights with other names in the layers of DeepSeek, whose routed and shared experts are one block."""

ExpertNames = Literal["shard_exp_on_fsdp", "use_2d_fsdp_sharding", "use_batch_split_schedule"]

EXPERT_NAMES: dict[ExpertNames, dict[str, tuple[str | None, ...]]] = {
    "shard_exp_on_fsdp": {
        "moe.gate": ("embed_moe", None, "mlp_moe"),
        "moe.up": ("embed_moe", None, "mlp_moe"),
        "moe.down": ("embed_moe", "mlp_moe", None),
    },
    "use_2d_fsdp_sharding": dict.fromkeys(("moe.gate", "moe.up", "moe.down"), ("embed_moe", "mlp_moe", None)),
    "use_batch_split_schedule": {
        "moe.gate": ("expert_only", "embed_moe", None),
        "moe.up": ("expert_only", "embed_moe", None),
        "moe.down": ("expert_only", None, "embed_moe"),
    },
}
"""Settings that give the dims of the experts' weights other names; of several that are on, the first applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A sharding constraint on an activation. ``dims``: our logical axes, one for each name.

    ``ours``: the same activation in our table. ``path``: the MoE path that has it. ``attention``: the kind of attention that
    has it. ``keys``: it is gathered along its length on purpose.
    """

    name: str
    names: tuple[str | None, ...]
    dims: tuple[str, ...]
    ours: str | None = None
    path: MoePath | None = None
    attention: Literal["grouped", "latent"] | None = None
    keys: bool = False


STREAM = ("batch", "length", "embed")
HEADS = ("batch", "length", "heads", "head_dim")
ATTENDED = ("batch", "heads", "kv_length", "head_dim")
IN_MOE = ("activation_exp", "activation_batch_moe", None)

ANNOTATIONS = (
    Annotation(
        name="input.tokens",
        names=("activation_embed_and_logits_batch", "activation_norm_length"),
        dims=("batch", "length"),
        ours="input.tokens",
    ),
    Annotation(
        name="embedding.output",
        names=("activation_embed_and_logits_batch", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="embedding.output",
    ),
    Annotation(
        name="residual.stream",
        names=("activation_batch", "activation_norm_length", "activation_embed"),
        dims=STREAM,
        ours="residual.stream",
    ),
    Annotation(
        name="attention.input",
        names=("activation_batch_attn", "activation_input_length_attn", "activation_embed_attn"),
        dims=STREAM,
        ours="attention.input",
        attention="grouped",
    ),
    Annotation(
        name="attention.input",
        names=("activation_batch_attn", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="attention.input",
        attention="latent",
    ),
    Annotation(
        name="attention.queries",
        names=("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        ours="attention.queries",
        attention="grouped",
    ),
    Annotation(
        name="attention.queries",
        names=("activation_kv_batch", "activation_length", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        ours="attention.queries",
        attention="latent",
    ),
    Annotation(
        name="attention.keys",
        names=("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim"),
        dims=("batch", "length", "kv_heads", "head_dim"),
        ours="attention.keys",
        attention="grouped",
    ),
    Annotation(
        name="attention.keys",
        names=("activation_kv_batch", "activation_length", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        attention="latent",
    ),
    Annotation(
        name="attention.keys_attended",
        names=("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"),
        dims=("batch", "kv_heads", "kv_length", "head_dim"),
        ours="attention.keys_attended",
        attention="grouped",
        keys=True,
    ),
    Annotation(
        name="attention.keys_attended",
        names=("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"),
        dims=ATTENDED,
        ours="attention.keys_attended",
        attention="latent",
        keys=True,
    ),
    Annotation(
        name="attention.output",
        names=("activation_batch_attn", "activation_length_attn", "activation_heads", "activation_kv"),
        dims=HEADS,
        ours="attention.output",
        attention="grouped",
    ),
    Annotation(
        name="attention.output",
        names=("activation_batch_attn", "activation_length", "activation_heads", "activation_kv"),
        dims=HEADS,
        ours="attention.output",
        attention="latent",
    ),
    Annotation(
        name="mlp.hidden",
        names=("activation_batch", "activation_length", "activation_mlp"),
        dims=("batch", "length", "mlp"),
        ours="mlp.hidden",
    ),
    Annotation(
        name="shared.hidden",
        names=("activation_batch", "activation_length", "activation_mlp"),
        dims=("batch", "length", "mlp"),
        ours="shared.hidden",
    ),
    Annotation(
        name="router.scores",
        names=("activation_batch_moe", "activation_length_moe", None),
        dims=("batch", "length", "scores"),
        ours="router.scores",
        path="capacity",
    ),
    Annotation(
        name="router.scores",
        names=("activation_batch", "activation_norm_length", None),
        dims=("batch", "length", "scores"),
        ours="router.scores",
        path="sparse",
    ),
    Annotation(
        name="moe.masks",
        names=("activation_batch_moe", "activation_norm_length_moe", None, None),
        dims=("batch", "length", "experts", "slots"),
        path="capacity",
    ),
    Annotation(
        name="moe.dispatched",
        names=(*IN_MOE, "activation_embed_moe"),
        dims=("experts", "batch", "slots", "embed"),
        ours="moe.dispatched",
        path="capacity",
    ),
    Annotation(
        name="moe.hidden",
        names=(*IN_MOE, "activation_mlp"),
        dims=("experts", "batch", "slots", "mlp"),
        ours="moe.hidden",
        path="capacity",
    ),
    Annotation(
        name="moe.output",
        names=(*IN_MOE, "activation_embed_moe"),
        dims=("experts", "batch", "slots", "embed"),
        ours="moe.output",
        path="capacity",
    ),
    Annotation(
        name="router.input",
        names=("activation_batch_moe", "activation_norm_length_moe", "activation_embed_moe"),
        dims=STREAM,
        ours="router.input",
        path="dropless",
    ),
    Annotation(
        name="router.input",
        names=("activation_batch", "activation_norm_length", None),
        dims=STREAM,
        ours="router.input",
        path="sparse",
    ),
    Annotation(
        name="logits.input",
        names=("activation_batch", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="logits.input",
    ),
    Annotation(
        name="logits.scores",
        names=("activation_embed_and_logits_batch", "activation_length", "activation_vocab"),
        dims=("batch", "length", "vocab"),
        ours="logits.scores",
    ),
    Annotation(
        name="logits.tiled",
        names=("activation_embed_and_logits_batch_sequence", "activation_vocab"),
        dims=("tokens", "vocab"),
    ),
)
"""In the order of the forward pass. ``logits.tiled``: logits computed in tiles, with rows and tokens as one dim."""
