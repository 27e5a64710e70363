"""The dimensions of a DeepSeek-V3 model, and its published sizes.

Source: ``config.json`` of deepseek-ai/DeepSeek-V3-Base and, for ``16b``, deepseek-ai/DeepSeek-V2-Lite. The latter
differs from V3 by its router (softmax, weights not normalised, no bias) and by queries that are not compressed.
The multi-token prediction head of V3 is not in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.core.findings.errors import InputError
from shardwright.core.model.training_only import AUXILIARY_LOSS, LOSS_OF_EACH_SEQUENCE, PREDICTION_LAYERS, published
from shardwright.models.parts.rope import Rope
from shardwright.models.parts.size import Natural, Size, require_at_most, require_multiple, require_positive

ROPE = Rope(
    kind="yarn",
    theta=10_000.0,
    factor=40.0,
    original_length=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    interleaved=True,
)
ROPE_LITE = Rope(
    kind="yarn",
    theta=10_000.0,
    factor=40.0,
    original_length=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.707,
    mscale_all_dim=0.707,
    interleaved=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeek3Config:
    """Dimensions of a DeepSeek-V3 model.

    ``mlp``: hidden units of a dense layer; ``expert_mlp``: of one expert, shared or not. A head's queries and
    keys have ``nope_dim`` elements without and ``rope_dim`` with rotary embedding, its values ``value_dim``.
    The router selects the best ``num_chosen_groups`` of ``num_groups`` groups of experts, then ``top_k`` experts in them.
    """

    num_layers: int
    num_dense_layers: int
    embed: int
    num_heads: int
    q_lora: int | None
    kv_lora: int
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    mlp: int
    expert_mlp: int
    num_experts: int
    num_groups: int
    num_chosen_groups: int
    top_k: int
    num_shared_experts: int
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    routing_bias: bool = True
    normalized_weights: bool = True
    routed_scale: float = 2.5
    capacity_factor: float | None = None
    vocab: int = 129_280
    norm_eps: float = 1e-6
    initializer_stddev: float = 0.02
    rope: Rope = ROPE

    def __post_init__(self) -> None:
        require_positive(norm_eps=self.norm_eps, initializer_stddev=self.initializer_stddev)
        require_positive(num_layers=self.num_layers, embed=self.embed, num_heads=self.num_heads, vocab=self.vocab)
        require_positive(kv_lora=self.kv_lora, nope_dim=self.nope_dim, value_dim=self.value_dim, mlp=self.mlp)
        require_positive(expert_mlp=self.expert_mlp, num_experts=self.num_experts, top_k=self.top_k)
        require_positive(num_groups=self.num_groups, num_chosen_groups=self.num_chosen_groups, rope_dim=self.rope_dim)
        if self.q_lora is not None:
            require_positive(q_lora=self.q_lora)
        if self.capacity_factor is not None:
            require_positive(capacity_factor=float(self.capacity_factor))
        if self.num_dense_layers < 0 or self.num_shared_experts < 0:
            raise InputError("num_dense_layers and num_shared_experts must not be below 0.")
        require_at_most(num_dense_layers=self.num_dense_layers, num_layers=self.num_layers)
        require_multiple(rope_dim=self.rope_dim, rotary_pair=2)
        require_multiple(num_experts=self.num_experts, num_groups=self.num_groups)
        require_at_most(num_chosen_groups=self.num_chosen_groups, num_groups=self.num_groups)
        in_chosen_groups = self.num_experts // self.num_groups * self.num_chosen_groups
        require_at_most(top_k=self.top_k, experts_in_chosen_groups=in_chosen_groups)
        if self.scoring == "sigmoid" and self.num_groups > 1:
            require_at_most(best_of_a_group=2, experts_per_group=self.num_experts // self.num_groups)


BALANCE = (
    *published(AUXILIARY_LOSS, aux_loss_alpha="0.001"),
    *published(LOSS_OF_EACH_SEQUENCE, seq_aux="true"),
)
"""What the published configurations say of training alone; of ``test``, as of ``671b``."""

PREDICTION = published(PREDICTION_LAYERS, num_nextn_predict_layers="1")

SIZES = {
    "test": Size(
        config=DeepSeek3Config(
            num_layers=4,
            num_dense_layers=1,
            embed=128,
            num_heads=4,
            q_lora=32,
            kv_lora=16,
            mlp=256,
            expert_mlp=128,
            num_experts=16,
            num_groups=4,
            num_chosen_groups=2,
            top_k=4,
            num_shared_experts=1,
            vocab=2048,
        ),
        natural=Natural(layout="ep-as-cp", mesh={"data": 1, "fsdp": 2, "expert": 4}, batch=8, length=128),
        dtype="float32",
        training_only=(*BALANCE, *PREDICTION),
    ),
    "16b": Size(
        config=DeepSeek3Config(
            num_layers=27,
            num_dense_layers=1,
            embed=2048,
            num_heads=16,
            q_lora=None,
            kv_lora=512,
            mlp=10_944,
            expert_mlp=1408,
            num_experts=64,
            num_groups=1,
            num_chosen_groups=1,
            top_k=6,
            num_shared_experts=2,
            scoring="softmax",
            routing_bias=False,
            normalized_weights=False,
            routed_scale=1.0,
            vocab=102_400,
            rope=ROPE_LITE,
        ),
        natural=Natural(layout="ep-as-cp", mesh={"data": 1, "fsdp": 4, "expert": 4}, batch=8, length=4096),
        training_only=BALANCE,
    ),
    "671b": Size(
        config=DeepSeek3Config(
            num_layers=61,
            num_dense_layers=3,
            embed=7168,
            num_heads=128,
            q_lora=1536,
            kv_lora=512,
            mlp=18_432,
            expert_mlp=2048,
            num_experts=256,
            num_groups=8,
            num_chosen_groups=4,
            top_k=8,
            num_shared_experts=1,
        ),
        natural=Natural(layout="ep-as-cp", mesh={"data": 1, "fsdp": 16, "expert": 8}, batch=64, length=4096),
        training_only=(*BALANCE, *PREDICTION),
    ),
}
