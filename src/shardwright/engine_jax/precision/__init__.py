"""Low precision: how operands of products are quantized, and what is multiplied then.

arrays.py       JAX's functions for the core's formula of quantizers
operands.py     an operand of a product, quantized
delayed.py      delayed scaling in a step: amaxes, then factors by the core's formula
coded.py        a weight in use of which codes were gathered
random_bits.py  random bits of a key and a counter
kernels.py      products of codes by the kernels that a device has
products.py     the three products with a weight
"""
