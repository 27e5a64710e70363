"""Schedules of pipelines: when each rank computes, sends and receives.

actions.py     the actions of ranks, and tables of them
orders.py      the order in which a rank of each schedule computes
schedules.py   the schedules by name, with what they ask of a step
transfers.py   sends, receives and reductions between the computations
ticks.py       the ticks of one program that all ranks run
clock.py       the times at which a table's actions end, and what each rank holds at once
proof.py       whether a table is right: everything computed and received once, and no rank waits for ever (a deadlock)
"""
