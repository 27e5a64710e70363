"""The PyTorch engine: it runs a plan on ranks. Its files have the names of those of the JAX engine.

For your own module: ``shapes_of``, ``parallelize``.
"""

from shardwright.engine_torch.own_program.module import parallelize, shapes_of

__all__ = ["parallelize", "shapes_of"]
