"""`shardwright search`: which layout for a model, on which chips, and how it is asked for.

search.py   the verb
like.py     with --like: one change of a layout
rows.py     answers as layouts and commands
compiling.py  with --compile: answers compiled, and ranked by their programs
apart.py    a call in a process of its own
"""
