"""A user's own module, sharded by a plan.

module.py      parallelize and shapes_of
units.py       the FSDP parameter groups of a module
values.py      checks that all ranks have the same values
"""
