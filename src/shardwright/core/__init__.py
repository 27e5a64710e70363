"""The layout core: what a layout means, decided in pure Python, before any framework is imported.

Standard library only. Engines lower what is decided here and decide nothing themselves.
"""
