"""A compiled program's text, taken apart.

hlo.py        computations and instructions
shapes.py     types of values
calls.py      which computation runs which, and how often
loops.py      how often a loop runs
groups.py     which devices a collective joins
numbering.py  how a program numbers its devices
origins.py    phase, component, tensors and source line of an operation
values.py     what a value is made from
uses.py       what a value is used for
"""
