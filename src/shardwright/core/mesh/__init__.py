"""The mesh of devices and the notation of specs over it.

mesh.py        named axes in the order of the devices
spec.py        each dim of one tensor with the axes that shard it
notation.py    a spec as text, and back
hops.py        collectives over a whole TPU slice, taken in two
divisors.py    sizes that divide, near one that does not
"""
