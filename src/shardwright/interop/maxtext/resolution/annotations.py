"""Where MaxText names dims: the logical names of each weight, and of each activation whose layout it asks for.

Read off AI-Hypercomputer/maxtext e591f30cb (August 2026): llama, mixtral and deepseek decoders, trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MoePath = Literal["capacity", "dropless", "sparse"]
"""How tokens come to experts: with a capacity, without one by dense products, or by the sparse kernels."""

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
"""By the name of a weight of ours without its stack. Stacked layers have their stack's name in front: ``layers``."""

WITH_SHARED_EXPERTS: dict[str, tuple[str | None, ...]] = {"router.kernel": ("embed_moe", None)}
"""What carries other names in the layers of DeepSeek, whose routed and shared experts are one block."""

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
"""Settings that give the dims of the experts' weights other names; where several are on, the first of them does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where an activation's layout is asked for. ``dims``: our logical axes, one for each name.

    ``ours``: the activation of our table that it is. ``path``: the way through the experts that it belongs to.
    ``attention``: the kind of attention that has it. ``keys``: gathered along its length on purpose.
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

SITES = (
    Site(
        name="input.tokens",
        names=("activation_embed_and_logits_batch", "activation_norm_length"),
        dims=("batch", "length"),
        ours="input.tokens",
    ),
    Site(
        name="embedding.output",
        names=("activation_embed_and_logits_batch", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="embedding.output",
    ),
    Site(
        name="residual.stream",
        names=("activation_batch", "activation_norm_length", "activation_embed"),
        dims=STREAM,
        ours="residual.stream",
    ),
    Site(
        name="attention.input",
        names=("activation_batch_attn", "activation_input_length_attn", "activation_embed_attn"),
        dims=STREAM,
        ours="attention.input",
        attention="grouped",
    ),
    Site(
        name="attention.input",
        names=("activation_batch_attn", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="attention.input",
        attention="latent",
    ),
    Site(
        name="attention.queries",
        names=("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        ours="attention.queries",
        attention="grouped",
    ),
    Site(
        name="attention.queries",
        names=("activation_kv_batch", "activation_length", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        ours="attention.queries",
        attention="latent",
    ),
    Site(
        name="attention.keys",
        names=("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim"),
        dims=("batch", "length", "kv_heads", "head_dim"),
        ours="attention.keys",
        attention="grouped",
    ),
    Site(
        name="attention.keys",
        names=("activation_kv_batch", "activation_length", "activation_kv_heads", "activation_kv_head_dim"),
        dims=HEADS,
        attention="latent",
    ),
    Site(
        name="attention.keys_attended",
        names=("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"),
        dims=("batch", "kv_heads", "kv_length", "head_dim"),
        ours="attention.keys_attended",
        attention="grouped",
        keys=True,
    ),
    Site(
        name="attention.keys_attended",
        names=("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"),
        dims=ATTENDED,
        ours="attention.keys_attended",
        attention="latent",
        keys=True,
    ),
    Site(
        name="attention.output",
        names=("activation_batch_attn", "activation_length_attn", "activation_heads", "activation_kv"),
        dims=HEADS,
        ours="attention.output",
        attention="grouped",
    ),
    Site(
        name="attention.output",
        names=("activation_batch_attn", "activation_length", "activation_heads", "activation_kv"),
        dims=HEADS,
        ours="attention.output",
        attention="latent",
    ),
    Site(
        name="mlp.hidden",
        names=("activation_batch", "activation_length", "activation_mlp"),
        dims=("batch", "length", "mlp"),
        ours="mlp.hidden",
    ),
    Site(
        name="shared.hidden",
        names=("activation_batch", "activation_length", "activation_mlp"),
        dims=("batch", "length", "mlp"),
        ours="shared.hidden",
    ),
    Site(
        name="router.scores",
        names=("activation_batch_moe", "activation_length_moe", None),
        dims=("batch", "length", "scores"),
        ours="router.scores",
        path="capacity",
    ),
    Site(
        name="router.scores",
        names=("activation_batch", "activation_norm_length", None),
        dims=("batch", "length", "scores"),
        ours="router.scores",
        path="sparse",
    ),
    Site(
        name="moe.masks",
        names=("activation_batch_moe", "activation_norm_length_moe", None, None),
        dims=("batch", "length", "experts", "slots"),
        path="capacity",
    ),
    Site(
        name="moe.dispatched",
        names=(*IN_MOE, "activation_embed_moe"),
        dims=("experts", "batch", "slots", "embed"),
        ours="moe.dispatched",
        path="capacity",
    ),
    Site(
        name="moe.hidden",
        names=(*IN_MOE, "activation_mlp"),
        dims=("experts", "batch", "slots", "mlp"),
        ours="moe.hidden",
        path="capacity",
    ),
    Site(
        name="moe.output",
        names=(*IN_MOE, "activation_embed_moe"),
        dims=("experts", "batch", "slots", "embed"),
        ours="moe.output",
        path="capacity",
    ),
    Site(
        name="router.input",
        names=("activation_batch_moe", "activation_norm_length_moe", "activation_embed_moe"),
        dims=STREAM,
        ours="router.input",
        path="dropless",
    ),
    Site(
        name="router.input",
        names=("activation_batch", "activation_norm_length", None),
        dims=STREAM,
        ours="router.input",
        path="sparse",
    ),
    Site(
        name="logits.input",
        names=("activation_batch", "activation_length", "activation_embed"),
        dims=STREAM,
        ours="logits.input",
    ),
    Site(
        name="logits.scores",
        names=("activation_embed_and_logits_batch", "activation_length", "activation_vocab"),
        dims=("batch", "length", "vocab"),
        ours="logits.scores",
    ),
    Site(
        name="logits.tiled",
        names=("activation_embed_and_logits_batch_sequence", "activation_vocab"),
        dims=("tokens", "vocab"),
    ),
)
"""In the order of the forward pass. ``logits.tiled`` is how logits are made in pieces: rows and tokens as one dim."""
