"""Seconds of collectives, of products, and of a step.

collectives.py  seconds of one collective, in closed form
rings.py        latencies of gathers, scatters and sums on a switch, by the size of their group
flops.py        what one device computes in a step
routing.py      how many rows the experts of a device receive
products.py     the rate that a product reaches by its shape, and that of attention
elementwise.py  bytes of what lies between products: norms, rotary embeddings, activations, the loss
launches.py     starts of experts' kernels by a host
copies.py       copies of `fully_shard` around its collectives
precision.py    seconds of all that is computed, under a recipe too, and bytes of quantization
step.py         the time of a step: compute and exposed communication
pipeline.py     the time of a step in stages, by their timetable
"""
