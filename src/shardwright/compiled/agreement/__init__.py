"""The program beside the plan: what of each is found in the other.

widths.py      bytes in the dtypes in which a compiler may compute
rewrites.py    what compilers make of a collective
matching.py    which of them explains each collective
agreement.py   what the program and the plan agree on
"""
