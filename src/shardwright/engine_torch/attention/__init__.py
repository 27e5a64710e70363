"""Attention on one rank, and around a ring of ranks.

attention.py   queries, keys and values, and by which kernel they meet
scores.py      products of queries and keys, and the mask
ring.py        keys and values passed around the ranks that share a row
"""
