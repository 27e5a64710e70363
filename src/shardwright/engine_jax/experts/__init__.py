"""Mixtures of experts: which tokens go where, and what experts make of them.

routing.py         the router's scores and the experts that each token chose
moe.py             a layer of experts, with its capacity
exchange.py        tokens sent to their experts' devices, and back
grouped.py         each row times the matrices of its own expert
grouped_blocks.py  the same, a block of rows at a time
"""
