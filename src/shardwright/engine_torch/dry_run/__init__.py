"""A dry run of a step, without ranks: which collectives it makes, and the memory it needs.

dry_run.py     the step of a plan, of each rank of its pipeline if it has one
stages.py      the ranks of a pipeline, from runs of their stages
imagined.py    one rank's step on tensors without values
kernels.py     what a GPU's kernels hold: attention, and functions that are one
counting.py    each collective with its group and bytes
held.py        the bytes of all live storages
"""
