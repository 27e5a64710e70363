"""Schedules of pipelines: when each rank computes, sends and receives.

actions.py     the actions of ranks, and tables of them
orders.py      the order in which a rank of each schedule computes
schedules.py   the schedules by name, with what they ask of a step
transfers.py   sends, receives and reductions between the computations
clock.py       a table run on a clock
proof.py       whether a table computes the gradients of a step
"""
