"""Compares the collectives and the memory of a program with those of its plan.

widths.py      dtypes of collectives, and their widths
rewrites.py    the known rewrites of collectives by compilers
matching.py    matches collectives, directly or by rewrites
agreement.py   the result of the comparison
"""
