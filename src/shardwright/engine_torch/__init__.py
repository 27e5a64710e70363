"""The PyTorch engine: it runs a plan on ranks. A file that the JAX engine has too has the same name.

For your own module: ``shapes_of``, ``parallelize``, ``clip_grad_norm_``, ``get_total_norm``, ``parameter_groups``; ``save``, ``load``, ``Saver``.
"""

from shardwright.engine_torch.own_program.module import parallelize, shapes_of
from shardwright.engine_torch.own_program.steps.norms import clip_grad_norm_, get_total_norm, parameter_groups
from shardwright.engine_torch.own_program.store import Loaded, Saver, load, save

__all__ = [
    "Loaded",
    "Saver",
    "clip_grad_norm_",
    "get_total_norm",
    "load",
    "parallelize",
    "parameter_groups",
    "save",
    "shapes_of",
]
