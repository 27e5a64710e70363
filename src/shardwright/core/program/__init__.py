"""The program of a model: named operations on values with named dims, and the rows of its table, which follow from them.

dims.py        a letter for each logical axis, and the dims of a product
primitives.py  the operations that there are, and what the backward pass of each reads
program.py     values, weights, steps, and a program of them
part.py        the operations of a part of a model, as calls, with their checks
draft.py       writing a program
sums.py        what each value, each cotangent and each gradient is a sum over
kept.py        what a layer makes that has a name, and what its backward pass reads
weights.py     its weights as rows
walk.py        the operations in the order in which an engine does them, with those that it does together
names.py       the names of its tensors, by what its operations make of them
rows.py        all rows: weights, activations, moves and operations
"""
