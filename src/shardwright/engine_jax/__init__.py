"""The JAX engine: the mathematics of the models, and the plan lowered to shardings and collectives.

own_program.py  shardings for a user's own pytree

For your own program: ``device_mesh``, ``shapes_of``, ``named_shardings``, ``named_sharding``, ``partition_spec``.
"""

from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.shardings import named_sharding, partition_spec
from shardwright.engine_jax.own_program import named_shardings, shapes_of

__all__ = ["device_mesh", "named_sharding", "named_shardings", "partition_spec", "shapes_of"]
