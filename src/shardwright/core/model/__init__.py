"""What the planner reads of a model.

table.py       weights, activations, and moves between activations
capacity.py    capacity of experts and of dispatch buffers
precision.py   dtypes of computations, stored results, transfers and sums
"""
