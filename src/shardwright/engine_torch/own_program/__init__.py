"""A user's own module, laid out by a plan.

module.py      parallelize and shapes_of
units.py       which parameters are gathered together
values.py      the values that a module has, and those of a checkpoint
"""
