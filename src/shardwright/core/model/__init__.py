"""What a model is to the planner.

table.py       weights, activations, and the moves between them
capacity.py    how many tokens an expert takes
precision.py   which dtype something is computed, kept, sent and summed in
"""
