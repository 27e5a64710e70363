"""The PyTorch engine: it runs a plan on ranks. A file that the JAX engine has too has the same name.

For your own module: ``shapes_of``, ``parallelize``; ``save``, ``load``, ``Saver``.
"""

from shardwright.engine_torch.own_program.module import parallelize, shapes_of
from shardwright.engine_torch.own_program.store import Loaded, Saver, load, save

__all__ = ["Loaded", "Saver", "load", "parallelize", "save", "shapes_of"]
