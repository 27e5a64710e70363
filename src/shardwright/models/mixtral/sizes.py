"""The dimensions of a Mixtral model, and its published sizes.

Source: ``config.json`` of mistralai/Mixtral-8x7B-v0.1 and mistralai/Mixtral-8x22B-v0.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.model.training_only import AUXILIARY_LOSS, published
from shardwright.models.parts.rope import Rope
from shardwright.models.parts.size import Natural, Size, require_at_most, require_multiple, require_positive

ROPE = Rope(theta=1_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """Dimensions of a Mixtral model. ``mlp``: hidden units of one expert. ``capacity_factor`` None: no token is dropped.
    ``window``: how many tokens a token attends to, itself included; None: all before it."""

    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    num_experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = None
    vocab: int = 32_000
    window: int | None = None
    norm_eps: float = 1e-5
    initializer_stddev: float = 0.02
    rope: Rope = ROPE

    def __post_init__(self) -> None:
        require_positive(norm_eps=self.norm_eps, initializer_stddev=self.initializer_stddev)
        require_positive(num_layers=self.num_layers, embed=self.embed, mlp=self.mlp, vocab=self.vocab)
        require_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        require_positive(num_experts=self.num_experts, top_k=self.top_k)
        require_multiple(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        require_multiple(head_dim=self.head_dim, rotary_pair=2)
        require_at_most(top_k=self.top_k, num_experts=self.num_experts)
        if self.window is not None:
            require_positive(window=self.window)
        if self.capacity_factor is not None:
            require_positive(capacity_factor=float(self.capacity_factor))


BALANCE = {
    name: published(AUXILIARY_LOSS, router_aux_loss_coef=value)
    for name, value in (("test", "0.02"), ("8x7b", "0.02"), ("8x22b", "0.001"))
}
"""What the published configurations say of training alone; of ``test``, as of ``8x7b``."""

SIZES = {
    "test": Size(
        config=MixtralConfig(num_layers=4, embed=128, num_heads=8, num_kv_heads=4, head_dim=16, mlp=256, vocab=2048),
        natural=Natural(layout="ep", mesh={"data": 1, "fsdp": 2, "expert": 4}, batch=8, length=128),
        dtype="float32",
        training_only=BALANCE["test"],
    ),
    "8x7b": Size(
        config=MixtralConfig(num_layers=32, embed=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp=14_336),
        natural=Natural(layout="ep", mesh={"data": 1, "fsdp": 1, "expert": 8}, batch=8, length=4096),
        training_only=BALANCE["8x7b"],
    ),
    "8x22b": Size(
        config=MixtralConfig(num_layers=56, embed=6144, num_heads=48, num_kv_heads=8, head_dim=128, mlp=16_384),
        natural=Natural(layout="ep", mesh={"data": 1, "fsdp": 8, "expert": 8}, batch=64, length=4096),
        training_only=BALANCE["8x22b"],
    ),
}
