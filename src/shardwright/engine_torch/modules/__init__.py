"""Modules for any PyTorch program, whose weights shard over TP and FSDP, are quantized by a recipe, and save exactly.

parallel.py         what all with parameters have: set_device_mesh, reset_parameters
products.py         what all with linear layers have: products as their recipe has them
linear.py           Linear
norm.py             RMSNorm and LayerNorm
normed.py           LayerNormLinear and LayerNormMLP
grouped.py          GroupedLinear
embedding.py        Embedding
attention.py        DotProductAttention
scales.py           update_scales: the end of a step, for recipes with delayed amaxes
parts/              what these are made of
"""

from shardwright.engine_torch.modules.attention import DotProductAttention
from shardwright.engine_torch.modules.embedding import Embedding
from shardwright.engine_torch.modules.grouped import GroupedLinear
from shardwright.engine_torch.modules.linear import Linear
from shardwright.engine_torch.modules.norm import LayerNorm, RMSNorm
from shardwright.engine_torch.modules.normed import LayerNormLinear, LayerNormMLP
from shardwright.engine_torch.modules.parts.autocasting import autocast
from shardwright.engine_torch.modules.scales import update_scales

__all__ = [
    "DotProductAttention",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "autocast",
    "update_scales",
]
