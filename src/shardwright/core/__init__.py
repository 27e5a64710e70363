"""The layout core: what a layout means, decided in pure Python, before any framework is imported.

planning.py    from a request to a plan
why.py         why a tensor lies where it does
named_axes.py  sets of a plan's axes by the names of other programs
installed.py   which packages are installed

Standard library only. Engines lower what is decided here and decide nothing themselves.
"""
