"""Attention on one device, and around a ring of devices.

attention.py   queries, keys and values, and by which kernel they meet
scores.py      plain products of queries and keys, and the mask
blockwise.py   one block of keys at a time, its maximum and sum carried along
blocks.py      which blocks a query sees
kernels.py     cuDNN's and splash attention
ring.py        keys and values passed around the devices that share a row
"""
