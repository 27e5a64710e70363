"""What the computation of a model needs beyond the shapes of its tensors: one description for all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.models.parts.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """``heads`` query heads that share ``kv_heads`` keys and values, each ``head_dim`` wide.

    ``window``: how many tokens a token attends to, itself included, which no engine computes for longer rows; None: all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are rotated by position."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA (DeepSeek-V2, arXiv:2405.04434): keys and values are computed from a latent of ``kv_lora``, and one shared
    rotary key of ``rope_dim``. ``q_lora`` None: queries are projected directly."""

    heads: int
    q_lora: int | None
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent(self) -> int:
        """Width of the tensor that devices exchange in place of keys and values."""
        return self.kv_lora + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are rotated by position."""
        return self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer of ``num`` experts of ``width`` hidden units; each token is routed to ``top_k`` of them.

    ``scoring``: softmax or sigmoid of the router's logits. Experts are in ``num_groups`` groups of neighbours, of
    which the best ``chosen_groups`` are kept. A group's score is the sum of its two best scores under sigmoid
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), its best score under softmax (DeepSeek-V2). ``normalized``: a token's
    weights are normalised to sum to one; all are multiplied by ``scale``. ``balanced_by_bias``: a frozen bias is added to the
    scores for the selection only. ``shared_width``: hidden units of the shared expert, which processes every token.
    ``capacity_factor`` None: no token is dropped; else an expert's capacity is that many times its even share of a row.
    """

    num: int
    width: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    chosen_groups: int = 1
    normalized: bool = True
    scale: float = 1.0
    balanced_by_bias: bool = False
    shared_width: int = 0
    capacity_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Consecutive layers of one kind: their weights are stacked, and their names begin with ``name``."""

    name: str
    num: int
    first_layer: int = 0
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: stacks of layers between an embedding and logits, RMS-normed, with SwiGLU feed-forward layers.

    ``mlp``: hidden units of the layers without experts. ``latent_norm_eps``: of the norms inside latent attention.
    """

    embed: int
    vocab: int
    tied: bool
    norm_eps: float
    latent_norm_eps: float
    rope: Rope
    attention: GroupedQueryAttention | LatentAttention
    mlp: int | None
    experts: Experts | None
    stacks: tuple[Stack, ...]
    initializer_stddev: float
