"""Attention on one rank, and around a ring of ranks.

attend.py   the heads that this rank attends with, and to
scores.py   PyTorch's attention, plain products of queries and keys, the mask, and the online softmax
ring.py     ring attention: keys and values permuted among the ranks that share a row
"""
