"""What a Python file builds, read and never run: known values are followed through it, and all else is ``Unread``.

values.py       what a name may stand for
modules.py      files, and the names that they import from one another
expressions.py  values of expressions
arguments.py    which parameter gets which argument
calls.py        functions, classes, and what a call may change
constants.py    methods and operators on values that are written out
statements.py   a function's way through its statements
unknown.py      what a statement that may run or not can change
state.py        what one reading has at hand, and how much it may still do

One rule keeps it honest: where something that is not read may have changed a value, the value is no longer known.
"""
