"""Mixtures of experts: routing, dispatch, the experts' products, and combination.

route.py       the top-k experts of each token and their weights
experts.py     from tokens to the sums of their experts, and which assignments an expert drops
rows.py        assignments sorted by expert: the rows that are sent
nodes.py       tokens sent once to each node that has one of their experts
exchange.py    all-to-all of rows to their experts' ranks and back
grouped.py     grouped products: each row times the matrices of its own expert
"""
