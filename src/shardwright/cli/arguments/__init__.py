"""The grammar of a command line: verbs and options declared as dataclasses, parsed, and their help. It knows none of them.

declared.py  the words of a declaration, and the options that a dataclass declares
verbs.py     the tree of verbs, and where in it a command line is
parsing.py   from arguments to the dataclass of a verb
usage.py     the error for a command line that is no use of its verb
help.py      the help of a verb
"""
