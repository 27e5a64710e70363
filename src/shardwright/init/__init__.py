"""Initial values: a function of seed, tensor name and element index, the same on every mesh, engine and machine.

values.py   initial values of any box
normal.py   truncated normal values from random bits
counter.py  random bits from a key and an index

``box_values`` computes any box of a weight of a model table; ``tensor_values`` does the same for any other tensor.
"""

from shardwright.init.values import box_values, tensor_values

__all__ = ["box_values", "tensor_values"]
