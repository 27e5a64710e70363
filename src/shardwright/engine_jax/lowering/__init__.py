"""The plan, lowered to JAX: shardings, and the collectives of each resharding.

shardings.py   specs as NamedSharding
coded.py       weights that are gathered as codes and scales
links.py       every move of the table and every use of a weight
resting.py     weights that rest as codes and scales
updates.py     how gradients are reduced over replicas, and which part of a weight a device updates
"""
