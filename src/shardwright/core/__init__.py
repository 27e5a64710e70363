"""The layout core: what a layout means, decided in pure Python, before any framework is imported.

planning.py   from a request to a plan
installed.py  which packages are installed

Standard library only. Engines lower what is decided here and decide nothing themselves.
"""
