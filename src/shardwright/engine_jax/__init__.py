"""The JAX engine: the mathematics of the models, and the plan lowered to shardings and collectives.

For your own program: ``device_mesh``, ``shapes_of``, ``named_shardings``, ``state_shardings``, ``named_sharding``, ``partition_spec``; ``save``, ``load``, ``Saver``.
"""

from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.shardings import named_sharding, partition_spec
from shardwright.engine_jax.own_program.shardings import named_shardings, shapes_of, state_shardings
from shardwright.engine_jax.own_program.store import Loaded, Saver, load, save

__all__ = [
    "Loaded",
    "Saver",
    "device_mesh",
    "load",
    "named_sharding",
    "named_shardings",
    "partition_spec",
    "save",
    "shapes_of",
    "state_shardings",
]
