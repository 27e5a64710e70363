"""Low precision: how operands of products are quantized, and what is multiplied then.

arrays.py       PyTorch's functions for the core's formula of quantizers
operands.py     an operand of a product, quantized
delayed.py      delayed scaling in a step: amaxes, then factors by the core's formula
coded.py        a weight in use of which codes were gathered
random_bits.py  random bits of a key and a counter
scales.py       scales of codes in the orders that GPUs take
kernels.py      products of codes on GPUs
grouped.py      those of all experts in one call
products.py     the three products with a weight
"""
