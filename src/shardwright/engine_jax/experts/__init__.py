"""Mixtures of experts: routing, dispatch, the experts' products, and combination.

route.py           the top-k experts of each token and their weights
experts.py         from tokens to the sums of their experts, and which assignments an expert drops
rows.py            assignments sorted by expert: the rows that are sent, and the sums of those that return
nodes.py           tokens sent once to each node that has one of their experts
exchange.py        all-to-all of rows to their experts' devices and back
grouped.py         grouped products: each row times the matrices of its own expert
grouped_blocks.py  the same, a block of rows at a time
grouped_low.py     the same with quantized operands
"""
