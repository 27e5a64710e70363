"""What a Python file builds, read and never run: known values are followed through it, and all else is ``Unread``.

values       what a name may stand for
modules      files, and the names that they import from one another
expressions  values of expressions
arguments    which parameter gets which argument
calls        functions, classes, and what a call may change
constants    methods and operators on values that are written out
statements   a function's way through its statements
unknown      what a statement that may run or not can change

One rule keeps it honest: where something that is not read may have changed a value, the value is no longer known.
"""
