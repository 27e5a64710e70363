"""Policies of recomputation: what a layer keeps for its backward pass, as data.

policy.py   a policy: for some layers what is kept, put on the host or made again, and its notation
reading.py  a policy from the values of a file
runs.py     the layers of a model that keep the same, and what is made again in their backward pass
repeated.py what of their communication the backward pass repeats
"""
