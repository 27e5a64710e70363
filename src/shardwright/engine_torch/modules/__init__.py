"""Modules for any PyTorch program, whose weights shard over TP and FSDP, are quantized by a recipe, and save exactly.

parallel.py         what all of them have: set_device_mesh, reset_parameters, a linear layer's product
linear.py           Linear
tensor_parallel.py  the exchanges of tensor parallelism as autograd functions, and a parameter in use
precision.py        the recipes that they compute, and which ranks agree on an amax
initial.py          initial values, the same on every mesh
arguments.py        Transformer Engine's arguments that have no meaning here
"""

from shardwright.engine_torch.modules.linear import Linear

__all__ = ["Linear"]
