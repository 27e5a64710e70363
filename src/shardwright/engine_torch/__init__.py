"""The PyTorch engine: it runs a plan on ranks. A file that the JAX engine has too has the same name.

For your own module: ``shapes_of``, ``parallelize``.
"""

from shardwright.engine_torch.own_program.module import parallelize, shapes_of

__all__ = ["parallelize", "shapes_of"]
