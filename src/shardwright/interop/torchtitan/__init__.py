"""TorchTitan: parallel degrees, as its configurations state them, and the order in which they lay out ranks.

importing.py  from a file to a layout, its ranks, and what is wrong
reading.py    TOML, JSON or Python
python.py     what a Python file builds
section.py    what a configuration says
words.py      the words of its section, with their defaults
degrees.py    degrees on a number of ranks
layout.py     from degrees to a layout
rows.py       the rows of a step
"""
