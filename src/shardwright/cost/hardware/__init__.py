"""Chips, the machine that they make, and its links.

chips.py    the table of chips: chips.toml has flops, memory and links, measured.toml what kernels reach, each number with its source
user.py     numbers of a user's own chips, from a file
device_names.py  which chip a device is, by the name that its driver gives
written.py  machines as their sellers write them, as v5p-512, in the form KIND:SHAPE
machine.py  the machine that --chips gives: a kind of chip and a shape
links.py    which links the axes of a mesh use
"""
