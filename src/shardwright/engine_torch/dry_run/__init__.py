"""A dry run of a step, without ranks: which collectives it makes, and the memory it needs.

dry_run.py     the step on tensors without values
counting.py    each collective with its group and bytes
held.py        the bytes of all live storages
"""
