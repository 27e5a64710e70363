"""Modules for any PyTorch program, whose weights shard over TP and FSDP, are quantized by a recipe, and save exactly.

parallel.py         what all with parameters have: set_device_mesh, reset_parameters
products.py         what all with linear layers have: products as their recipe has them
linear.py           Linear
norm.py             RMSNorm and LayerNorm
normed.py           LayerNormLinear and LayerNormMLP
grouped.py          GroupedLinear
embedding.py        Embedding
projections.py      queries, keys and values of one input
multihead.py        MultiheadAttention
transformer.py      TransformerLayer
scales.py           update_scales: the end of a step, for recipes with delayed amaxes
attention/          DotProductAttention and RotaryPositionEmbedding
codes/              weights that rest as codes: quantized_model_init, keep_main_weights, published weights
parts/              what these are made of
"""

from shardwright.engine_torch.modules.attention.dot_product import DotProductAttention
from shardwright.engine_torch.modules.attention.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from shardwright.engine_torch.modules.codes.initialization import fp8_model_init, quantized_model_init
from shardwright.engine_torch.modules.codes.main_weights import keep_main_weights
from shardwright.engine_torch.modules.codes.published import load_published_weights, published_weights
from shardwright.engine_torch.modules.embedding import Embedding
from shardwright.engine_torch.modules.grouped import GroupedLinear
from shardwright.engine_torch.modules.linear import Linear
from shardwright.engine_torch.modules.multihead import MultiheadAttention
from shardwright.engine_torch.modules.norm import LayerNorm, RMSNorm
from shardwright.engine_torch.modules.normed import LayerNormLinear, LayerNormMLP
from shardwright.engine_torch.modules.parts.autocasting import autocast, fp8_autocast
from shardwright.engine_torch.modules.parts.fused import from_transformer_engine, to_transformer_engine
from shardwright.engine_torch.modules.scales import update_scales
from shardwright.engine_torch.modules.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "from_transformer_engine",
    "keep_main_weights",
    "load_published_weights",
    "published_weights",
    "quantized_model_init",
    "to_transformer_engine",
    "update_scales",
]
