"""Parses the text of a compiled program.

hlo.py        computations and instructions
shapes.py     types of values
calls.py      which computation runs which, and how often
loops.py      how often a loop runs
groups.py     the device groups of a collective
numbering.py  how a program numbers its devices
origins.py    phase, component, tensors and source line of an operation
values.py     what a value is computed from
uses.py       what a value is used for
"""
