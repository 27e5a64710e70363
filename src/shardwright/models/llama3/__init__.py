"""Llama 3.1 and 3.2 (arXiv:2407.21783): dense, grouped-query attention, SwiGLU.

sizes.py  its named sizes
table.py  its table
"""
