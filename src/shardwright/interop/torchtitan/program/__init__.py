"""What a Python file builds, by abstract interpretation: known values are tracked, all others are ``Unread``. It never runs.

values.py       what a name may be bound to
modules.py      files, and the names that they import from one another
expressions.py  values of expressions
arguments.py    which parameter gets which argument
calls.py        functions, classes, and what a call may change
constants.py    methods and operators on literal values
statements.py   the statements of a function, in order
unknown.py      what a statement that may not run can change
state.py        the state of one interpretation, and its limits

One rule keeps it sound: where code that is not interpreted may have changed a value, the value is no longer known.
"""
