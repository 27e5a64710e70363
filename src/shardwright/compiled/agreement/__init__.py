"""Compares the collectives and the memory of a program with those of its plan.

widths.py      dtypes of collectives, and their widths
lone_layers.py how much of a collective is of loops over one layer
rewrites.py    the table of rewrites that are accepted: what a compiler makes of a collective
matching.py    matches collectives, directly or by rewrites
agreement.py   the result of the comparison
"""
