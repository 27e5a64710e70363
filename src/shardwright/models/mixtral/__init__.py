"""Mixtral (arXiv:2401.04088): grouped queries, and eight experts in every layer of which two see a token.

sizes.py  its named sizes
table.py  its table
"""
