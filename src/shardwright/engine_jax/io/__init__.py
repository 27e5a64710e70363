"""What the mathematics is given of the mesh: collectives by name, dtypes, and names for the compiler.

layer_io.py      what a layer asks of the engine: moves, uses of weights, groups
redistribute.py  the steps of the core as collectives of JAX
mesh.py          the mesh of JAX devices
dtypes.py        the core's table of precision as JAX dtypes
scopes.py        whose each operation is, for who reads the compiled program
"""
