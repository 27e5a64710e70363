"""The mesh of devices and the notation of specs over it.

mesh.py        named axes in the order of the devices
spec.py        each dim of one tensor with the axes that shard it
notation.py    specs as text: parsing and printing
hops.py        collectives over an entire TPU slice: one, two hops, or chunks
hashed.py      values whose hash is computed once
divisors.py    divisors and multiples near a number
"""
