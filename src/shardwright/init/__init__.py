"""Initial values: a function of seed, tensor name and element index, the same on every mesh, engine and machine.

``box_values`` makes any box of a weight of a model table alone; ``tensor_values`` does it for a tensor of one's own.
"""

from shardwright.init.values import box_values, tensor_values

__all__ = ["box_values", "tensor_values"]
