"""What the modules are made of.

tensor_parallel.py  the exchanges of tensor parallelism as autograd functions, and a parameter in use
precision.py        the recipes that they compute, and which ranks agree on an amax
delayed.py          what a module keeps for delayed amaxes between steps
random_bits.py      what a module keeps for random bits, and which ones an element has
initial.py          initial values, the same on every mesh
signatures.py       Transformer Engine's arguments, in order and with their defaults
arguments.py        those of them that have no meaning here
recipe_objects.py   its recipes, by name and as objects
autocasting.py      its autocast
activations.py      its activations
fused.py            weights as Transformer Engine's checkpoints have them, read and written
"""
