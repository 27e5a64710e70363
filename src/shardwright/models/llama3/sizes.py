"""The dimensions of a Llama 3 model, and its published sizes.

Source: ``config.json`` of meta-llama/Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B and Llama-3.1-405B.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.models.parts.rope import Rope
from shardwright.models.parts.size import Natural, Size, require_multiple, require_positive

ROPE = Rope(kind="llama3", theta=500_000.0, factor=8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)
ROPE_3_2 = Rope(
    kind="llama3", theta=500_000.0, factor=32.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Config:
    """Dimensions of a Llama 3 model. ``tied``: the embedding is also the weight of the logits. ``window``: how many
    tokens a token attends to, itself included; None: all before it."""

    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 128_256
    tied: bool = False
    window: int | None = None
    norm_eps: float = 1e-5
    initializer_stddev: float = 0.02
    rope: Rope = ROPE

    def __post_init__(self) -> None:
        require_positive(norm_eps=self.norm_eps, initializer_stddev=self.initializer_stddev)
        require_positive(num_layers=self.num_layers, embed=self.embed, mlp=self.mlp, vocab=self.vocab)
        require_positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        require_multiple(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        require_multiple(head_dim=self.head_dim, rotary_pair=2)
        if self.window is not None:
            require_positive(window=self.window)


SIZES = {
    "test": Size(
        config=Llama3Config(num_layers=6, embed=256, num_heads=16, num_kv_heads=16, head_dim=16, mlp=768, vocab=2048),
        natural=Natural(layout="fsdp", mesh={"fsdp": 8}, batch=8, length=128),
        dtype="float32",
    ),
    "1b": Size(
        config=Llama3Config(
            num_layers=16,
            embed=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            mlp=8192,
            tied=True,
            rope=ROPE_3_2,
        ),
        natural=Natural(layout="fsdp", mesh={"fsdp": 8}, batch=16, length=8192),
    ),
    "8b": Size(
        config=Llama3Config(num_layers=32, embed=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp=14_336),
        natural=Natural(layout="hsdp", mesh={"data": 2, "fsdp": 8}, batch=16, length=8192),
    ),
    "70b": Size(
        config=Llama3Config(num_layers=80, embed=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp=28_672),
        natural=Natural(layout="fsdp", mesh={"fsdp": 64}, batch=64, length=8192),
    ),
    "405b": Size(
        config=Llama3Config(num_layers=126, embed=16_384, num_heads=128, num_kv_heads=8, head_dim=128, mlp=53_248),
        natural=Natural(layout="fsdp-tp", mesh={"data": 1, "fsdp": 64, "tensor": 8}, batch=64, length=8192),
    ),
}
