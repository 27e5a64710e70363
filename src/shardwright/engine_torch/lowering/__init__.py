"""The plan, lowered to PyTorch: DTensor parameters, FSDP groups, and the collectives of each resharding.

named_axes.py  names of axes that other programs ask the mesh for
parameters.py  the parameters of a rank as DTensors
gathering.py   the FSDP groups of the plan, made by fully_shard
coded.py       the FSDP groups of which codes and scales are gathered
updates.py     the update of weights, where axes shard it and not the weights
links.py       every move of the table and every use of a weight
"""
