"""Reads a compiled program's text back into the terms of the core, and compares it with the plan. No framework.

out_of_memory.py  the error of a compiler for a program that does not fit
links.py  what a program sends over the links of a machine, in seconds by the rates of its plan
"""
