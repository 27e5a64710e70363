"""The role table: what an axis does in a component. It defines the layout language; code, docs and tests read it."""

from __future__ import annotations

from dataclasses import dataclass

COMPONENTS = ("input", "embedding", "residual", "attention", "mlp", "router", "moe", "logits")
"""The parts of a model in which a mesh axis may have a role of its own, in the order of the forward pass."""

OUTSIDE_LAYERS = ("input", "embedding", "logits")
"""The components that exist once, before or after the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One row of the role table.

    ``activations``: the logical axes of activations that an axis of this role shards (of those a tensor has).
    ``weights``: the logical axes of weights that it shards at rest and in use.
    ``stores``: it also shards each weight's storage dim at rest, and the weight is gathered for use.
    ``components``: where the role has something to shard; in the others an axis of this role is idle.
    """

    name: str
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    stores: bool
    components: tuple[str, ...]
    about: str


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            name="data",
            activations=("batch",),
            weights=(),
            stores=False,
            components=COMPONENTS,
            about="shards the batch; every weight is replicated",
        ),
        Role(
            name="fsdp",
            activations=("batch",),
            weights=(),
            stores=True,
            components=COMPONENTS,
            about="shards the batch; every weight is sharded at rest on its storage dim and gathered for use",
        ),
        Role(
            name="context",
            activations=("length", "q_length", "groups"),
            weights=(),
            stores=True,
            components=COMPONENTS,
            about="shards the sequence, never the keys attended to; weights are sharded at rest as under fsdp",
        ),
        Role(
            name="tensor",
            activations=("heads", "kv_heads", "mlp", "vocab"),
            weights=("heads", "kv_heads", "mlp", "vocab"),
            stores=False,
            components=("embedding", "attention", "mlp", "moe", "logits"),
            about="shards heads, hidden units and vocabulary, of weights and of activations",
        ),
        Role(
            name="expert",
            activations=("experts",),
            weights=("experts",),
            stores=False,
            components=("moe",),
            about="shards the experts; tokens or weights move, as `move: {moe: ...}` sets",
        ),
        Role(
            name="stage",
            activations=(),
            weights=("layers",),
            stores=False,
            components=tuple(c for c in COMPONENTS if c not in OUTSIDE_LAYERS),
            about="divides the layers into pipeline stages",
        ),
        Role(
            name="idle",
            activations=(),
            weights=(),
            stores=False,
            components=COMPONENTS,
            about="does nothing here, explicitly",
        ),
    )
}

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev", "circular")
"""The schedules of role ``stage``; ``core/schedules/schedules.py`` has each."""

SEQUENCE_PARALLEL = ("residual", "length")
"""The component and the dim that role ``tensor`` also shards if its entry sets ``sequence_parallel: true``."""

EXCHANGED_FOR_HEADS = ("heads", "kv_heads")
"""The dims of queries, keys and values that role ``context`` shards inside attention, under ``move: {attention: ulysses}``:
there, heads are sharded and rows are not."""

UNIT_NAMES = {
    "heads": "head",
    "kv_heads": "KV head",
    "experts": "expert",
    "scores": "expert",
    "layers": "layer",
    "batch": "row",
    "length": "token",
    "vocab": "vocabulary entry",
}
"""The name of one unit along a logical axis; an axis that is not here counts elements."""

LOGICAL_AXES = {
    "batch": "rows of the global batch",
    "length": "tokens of a row, as queries, keys and values are computed",
    "q_length": "tokens of a row, as queries attend",
    "kv_length": "tokens of a row, as keys and values are attended to: never sharded",
    "embed": "the width of the residual stream",
    "embed_out": "the same width, if it occurs a second time in one tensor",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "the width of one head",
    "rope_dim": "the rotary part of a head's width",
    "q_lora": "the compressed width of MLA's queries",
    "kv_lora": "the compressed width of MLA's keys and values: the latent",
    "latent": "the latent and the shared rotary key, if one weight computes both",
    "mlp": "hidden units of a feed-forward layer, of an expert too",
    "vocab": "vocabulary entries",
    "scores": "experts, on the token side: the router's scores",
    "experts": "experts, where they compute",
    "groups": "groups of tokens of a row that are dispatched together; sharded as length is",
    "tokens": "tokens of one group",
    "slots": "buffer slots for tokens, per expert and group",
    "top_k": "the experts chosen for a token",
    "layers": "layers that share one row of the table",
    "norm": "the width of a norm's scale: unsharded at rest",
}
"""Every logical axis that our model tables may use."""
