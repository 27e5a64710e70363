"""What attention and layers of a transformer refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.engine_torch.modules import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from tests.engine_torch.attention_cases import cumulative
from tests.engine_torch.refused_modules import refusal

NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def attention(heads: int = 4, channels: Any = 2, groups: int | None = None, **options: Any) -> DotProductAttention:
    return DotProductAttention(heads, channels, groups, **{"qkv_format": "bshd", **options})


def called(mask: str = "causal", layout: str = "bshd", tokens: int = 6, **arguments: Any) -> torch.Tensor:
    q = torch.ones(2, tokens, 4, 2)
    q = q.flatten(0, 1) if layout == "thd" else q
    return attention(attn_mask_type=mask, qkv_format=layout)(q, q, q, **arguments)


ALONE: Mapping[str, Callable[[], object]] = {
    "13 heads": lambda: attention(13, 2, tp_size=2),
    "13 heads of a layer": lambda: TransformerLayer(104, 64, 13, tp_size=2, set_parallel_mode=True, **NO_DROPOUT),
    "channels": lambda: TransformerLayer(100, 64, 13, **NO_DROPOUT),
    "groups": lambda: attention(6, 2, 4),
    "dropout": lambda: TransformerLayer(8, 16, 2),
    "dropout of attention": lambda: MultiheadAttention(8, 2, attention_dropout=0.5),
    "sequence": lambda: MultiheadAttention(8, 2, attention_dropout=0.0, sequence_parallel=True),
    "mask": lambda: attention(attn_mask_type="causal_top"),
    "window": lambda: attention(window_size=(3, -2)),
    "causal window": lambda: attention(attn_mask_type="no_mask", window_size=(-1, 0)),
    "diagonal": lambda: attention(bottom_right_diagonal=True),
    "softmax": lambda: attention(softmax_type="learnable"),
    "residual": lambda: TransformerLayer(
        8, 16, 2, apply_residual_connection_post_layernorm=True, parallel_attention_mlp=True, **NO_DROPOUT
    ),
    "excluding": lambda: TransformerLayer(8, 16, 2, parallel_attention_mlp=True, output_layernorm=True, **NO_DROPOUT),
    "overlap": lambda: TransformerLayer(8, 16, 2, ub_tp_comm_overlap=True, **NO_DROPOUT),
    "encoder": lambda: TransformerLayer(8, 16, 2, layer_type="decoder", **NO_DROPOUT)(torch.ones(2, 1, 8)),
    "bias": lambda: called(core_attention_bias_type="alibi"),
    "cache": lambda: called(inference_params="cache"),
    "channels of no size": lambda: attention(4, 0),
    "three channels": lambda: attention(4, (2, 2, 2)),
    "channels in words": lambda: attention(4, "16"),
    "a list of lengths": lambda: called("padding", "thd", cu_seqlens_q=[0, 12], cu_seqlens_kv=[0, 12]),
    "activation": lambda: TransformerLayer(8, 16, 2, **{**NO_DROPOUT, "activation": ["gelu"]}),
    "misspelt": lambda: called(qkv_layers=1),
    "heads": lambda: attention(2, 2)(*(torch.ones(2, 6, 4, 2),) * 3),
    "packed and causal": lambda: called("causal", "thd"),
    "no lengths": lambda: called("padding", "thd"),
    "unused mask": lambda: called(attention_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool)),
    "no mask": lambda: called("arbitrary"),
    "shape of a mask": lambda: called("arbitrary", attention_mask=torch.ones(2, 1, 6, 5, dtype=torch.bool)),
    "shape of padding": lambda: called("padding", attention_mask=torch.ones(2, 6, dtype=torch.bool)),
    "long": lambda: called("padding", cu_seqlens_q=cumulative([7, 5]), cu_seqlens_kv=cumulative([6, 6])),
    "descending": lambda: called("padding", cu_seqlens_q=torch.tensor([0, 4, 2]), cu_seqlens_kv=cumulative([6, 6])),
    "places": lambda: called(
        "padding",
        "thd",
        cu_seqlens_q=cumulative([5, 5]),
        cu_seqlens_kv=cumulative([5, 5]),
        cu_seqlens_q_padded=cumulative([4, 6]),
        cu_seqlens_kv_padded=cumulative([6, 6]),
    ),
    "more tokens": lambda: called("padding", "thd", cu_seqlens_q=cumulative([13]), cu_seqlens_kv=cumulative([12])),
    "odd rotation": lambda: RotaryPositionEmbedding(6, rotary_percent=0.5),
    "angles": lambda: apply_rotary_pos_emb(torch.ones(5, 1, 2, 4), RotaryPositionEmbedding(4)(4)),
}


def on_ranks() -> Mapping[str, str]:
    """What one of four ranks is refused under context and tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    group = mesh.get_group("cp")

    def under(communication: str = "p2p", of: Any = group, ranks: Any = None) -> Callable[..., torch.Tensor]:
        def call(mask: str, layout: str, tokens: int, **arguments: Any) -> torch.Tensor:
            module = attention(attn_mask_type=mask, qkv_format=layout)
            module.set_context_parallel_group(of, ranks, None, communication)
            q = torch.ones(1, tokens, 4, 2)
            q = q[0] if layout == "thd" else q
            return module(q, q, q, **arguments)

        return call

    lengths = {"cu_seqlens_q": cumulative([6, 6]), "cu_seqlens_kv": cumulative([6, 6])}
    cases: Mapping[str, Callable[[], object]] = {
        "odd": lambda: under()("causal", "bshd", 3),
        "mask": lambda: under()("padding", "bshd", 4, attention_mask=torch.ones(1, 1, 1, 4, dtype=torch.bool)),
        "chunks": lambda: under()("padding", "thd", 6, **lengths),
        "two groups": lambda: under("a2a+p2p", [group, group])("causal", "bshd", 4),
        "another way": lambda: under("ring")("causal", "bshd", 4),
        "ranks": lambda: under(ranks=[1, 0])("causal", "bshd", 4),
        "group": lambda: under(of=mesh["cp"])("causal", "bshd", 4),
        "heads": lambda: attention(3, 2, cp_group=group, cp_comm_type="a2a"),
        "tp heads": lambda: attention(6, 2, tp_mesh=mesh["tp"], cp_group=group, cp_comm_type="a2a"),
    }
    assert dist.get_world_size() == 4
    return {name: refusal(do) for name, do in cases.items()}
