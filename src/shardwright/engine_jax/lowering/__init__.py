"""The plan, lowered to JAX: shardings, and the collectives between two specs.

shardings.py   specs as NamedSharding
links.py       every move of the table and every use of a weight
"""
