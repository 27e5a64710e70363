"""A user's own module: sharded by a plan, saved and loaded.

module.py      parallelize and shapes_of
units.py       the FSDP parameter groups of a module
values.py      checks that all ranks have the same values
shards.py      the boxes that a rank holds of a tensor, and their elements
tied.py        tied tensors, which another program has saved under several names
recipes.py     the recipe of a module with delayed amaxes, as a buffer
naming.py      a module's tensors and weight averages by their names in a checkpoint
holding.py     the optimizers whose state is saved, and what they keep elsewhere
moments.py     an optimizer's state by the names of its parameters
store.py       save and load
waiting.py     steps of an optimizer that wait for a save
"""
