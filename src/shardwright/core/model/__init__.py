"""What the planner reads of a model.

table.py         weights, activations, and moves between activations
architecture.py  the architecture as JSON values, and where two differ
names.py         the tensors that the core asks for, by what they are in the model's program
capacity.py      how many assignments an expert and a receive buffer hold
precision.py     dtypes of computations, stored results, transfers and sums
optimizer.py     what an optimizer keeps between two steps
training_only.py what its configuration says of training alone, and is not computed
"""
