"""What the mathematics gets of the ranks: collectives by name, process groups, dtypes.

layer_io.py      what a layer gets from the engine: moves, uses of weights, groups
redistribute.py  the core's steps as PyTorch collectives
exchange.py      bytes from every rank to every other, for loads
mesh.py          ranks and their process groups
private.py       all uses of PyTorch's private names
dtypes.py        the core's table of precision as PyTorch dtypes
scopes.py        the component and tensor of each collective, for the dry run
"""
