"""What the mathematics is given of the ranks: collectives by name, process groups, dtypes.

layer_io.py      what a layer asks of the engine: moves, uses of weights, groups
redistribute.py  the steps of the core as collectives of PyTorch
mesh.py          ranks and their process groups
private.py       what PyTorch has under private names, in one place
dtypes.py        the core's table of precision as PyTorch dtypes
scopes.py        whose each collective is, for who counts them
"""
