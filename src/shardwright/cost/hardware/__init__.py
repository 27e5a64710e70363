"""Chips, the machine that they make, and its links.

chips.py    the table of chips, chips.toml: flops, memory, links, each with its source
machine.py  the machine that --chips gives: a kind of chip and a shape
links.py    which links the axes of a mesh use
"""
