"""Handwritten training steps for one model and one layout: jit, shardings and sharding constraints.

They are what Shardwright's step is timed against, so nothing here imports it.
"""
