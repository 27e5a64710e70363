"""A plan in stages: each stage is planned as a model of its own, and what follows for the ranks.

requests.py  the requests of stages
derived.py   the planned pipeline, the memory of a rank, and its collectives
"""
