"""TorchTitan: parallel degrees, as its configurations state them, and the order of its ranks.

importing.py   from a file to a layout, its ranks, and findings
export.py      from a layout to a file
reading.py     TOML, JSON or Python
python.py      the configuration that a Python file builds
section.py     the options of a configuration
vocabulary.py  the names of its options, with their defaults
degrees.py     degrees on a number of ranks
layout.py      from degrees to a layout
rows.py        the rows of a step
recomputation.py  what layers keep for their backward pass
stages.py      the stages of a pipeline, its schedule and their units
"""
