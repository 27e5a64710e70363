"""A checkpoint of any program: the tensors that its processes hold, and values.

members.py     the processes of a program, which exchange values and fail together
witnesses.py   which processes have ended, as others on their machine see it
held.py        a tensor as one process holds it
replicas.py    which process writes which box, and whether replicas are equal
values.py      values that are not tensors, as JSON
store.py       saves a program's tensors and values, and opens them
background.py  saves them while the program goes on
entries.py     the entries of a checkpoint as those of a nested state
conversion.py  a folder of another program, imported or exported: what does not depend on the program
fitting.py     the tensors of a checkpoint against those that a program asks for
"""
