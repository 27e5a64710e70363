"""The JAX engine: the mathematics of the tables, and their layout lowered to shardings."""
