"""Training steps as one would write them by hand for one model and one layout: jit, shardings and constraints.

They are what Shardwright's step is timed against, so nothing here imports it.
"""
