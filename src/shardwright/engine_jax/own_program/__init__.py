"""A user's own pytree: its shardings, saved and loaded.

shardings.py  shapes_of, named_shardings and state_shardings
leaves.py     the leaves of a tree by name: arrays, keys and values
store.py      save and load
"""
