"""A compiled program's text: its computations, calls, loops, groups and values."""
