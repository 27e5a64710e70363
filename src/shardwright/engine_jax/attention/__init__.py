"""Attention on one device, and around a ring of devices.

attend.py      queries, keys and values, given to the kernel that the plan chose
scores.py      plain products of queries and keys, the mask, and the online softmax
blockwise.py   online softmax, one block of keys at a time
blocks.py      the blocks of a row, and the mask of two of them
kernels.py     cuDNN's, splash and Triton attention
ring.py        ring attention: keys and values permuted among the devices that share a row
"""
