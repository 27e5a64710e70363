"""A step walked through without the ranks: which collectives it makes, and the bytes it holds.

dry_run.py     the step on tensors without elements
counting.py    each collective with its group and bytes
held.py        the bytes that are held
"""
