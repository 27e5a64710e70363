"""What the mathematics gets of the mesh: collectives by name, dtypes, and names for the compiler.

layer_io.py      what a layer gets from the engine: moves, uses of weights, axes
recomputation.py what a layer keeps for its backward pass
redistribute.py  the core's steps as JAX collectives
exchange.py      bytes from every process to every other, for loads
mesh.py          the mesh of JAX devices
dtypes.py        the core's table of precision as JAX dtypes
scopes.py        the component and tensor of each operation, for readers of the compiled program
"""
