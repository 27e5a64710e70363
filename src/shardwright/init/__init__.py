"""Initial values: a function of seed, tensor name and element index, the same on every mesh, engine and machine.

``box_values`` computes any box of a weight of a model table; ``tensor_values`` does the same for any other tensor.
"""

from shardwright.init.values import box_values, tensor_values

__all__ = ["box_values", "tensor_values"]
