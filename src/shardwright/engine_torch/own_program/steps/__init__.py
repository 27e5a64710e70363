"""What each step needs of a user's own module: its weights as they are now, their gradients over all ranks, and equal replicas.

planned.py     the weights that a module has now, against those of its plan
gradients.py   reductions of gradients, once in each backward pass
"""
