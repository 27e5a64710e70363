"""What each step needs of a user's own module: its weights as they are now, their gradients over all ranks, and equal replicas.

planned.py     the weights that a module has now, against those of its plan
gradients.py   reductions of gradients, once in each backward pass
buffers.py     buffers that no checkpoint holds
replicas.py    replicas compared, after the first update
norms.py       the norm of all gradients, and groups for an optimizer
"""
