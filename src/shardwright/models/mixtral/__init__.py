"""Mixtral (arXiv:2401.04088): grouped-query attention; each token is routed to two of eight experts in every layer.

sizes.py  its named sizes
table.py  its table
"""
