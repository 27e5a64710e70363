"""The JAX engine: the mathematics of the tables, and their layout lowered to shardings.

For a program of one's own: ``device_mesh``, ``shapes_of``, ``named_shardings``, ``named_sharding``, ``partition_spec``.
"""

from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.shardings import named_sharding, partition_spec
from shardwright.engine_jax.own_program import named_shardings, shapes_of

__all__ = ["device_mesh", "named_sharding", "named_shardings", "partition_spec", "shapes_of"]
