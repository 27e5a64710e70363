"""What the mathematics gets of the ranks: collectives by name, process groups, dtypes.

layer_io.py      what a layer gets from the engine: moves, uses of weights, groups
redistribute.py  the core's steps as PyTorch collectives
host.py          tensors in host memory, for saves and for backward passes
exchange.py      bytes from every rank to every other, for loads
mesh.py          ranks and their process groups
private.py       all uses of PyTorch's private names
dtypes.py        the core's table of precision as PyTorch dtypes
scopes.py        the component and tensor of each collective, for the dry run
operations.py    operations on tensors, recorded
fused.py         functions that a GPU computes in one pass over memory
recomputation.py what a layer keeps for its backward pass, and its second run, which makes all else
"""
