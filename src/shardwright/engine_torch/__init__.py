"""The PyTorch engine: it carries out on ranks what the core has decided, under the file names of the JAX engine.

For a module of one's own: ``shapes_of``, ``parallelize``.
"""

from shardwright.engine_torch.own_program.module import parallelize, shapes_of

__all__ = ["parallelize", "shapes_of"]
