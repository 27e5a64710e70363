"""Modules for any PyTorch program, whose weights shard over TP and FSDP, are quantized by a recipe, and save exactly.

parallel.py         what all with parameters have: set_device_mesh, reset_parameters, a linear layer's product
linear.py           Linear
norm.py             RMSNorm and LayerNorm
normed.py           LayerNormLinear and LayerNormMLP
grouped.py          GroupedLinear
embedding.py        Embedding
attention.py        DotProductAttention
tensor_parallel.py  the exchanges of tensor parallelism as autograd functions, and a parameter in use
precision.py        the recipes that they compute, and which ranks agree on an amax
initial.py          initial values, the same on every mesh
arguments.py        Transformer Engine's arguments that have no meaning here
"""

from shardwright.engine_torch.modules.attention import DotProductAttention
from shardwright.engine_torch.modules.embedding import Embedding
from shardwright.engine_torch.modules.grouped import GroupedLinear
from shardwright.engine_torch.modules.linear import Linear
from shardwright.engine_torch.modules.norm import LayerNorm, RMSNorm
from shardwright.engine_torch.modules.normed import LayerNormLinear, LayerNormMLP

__all__ = [
    "DotProductAttention",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]
