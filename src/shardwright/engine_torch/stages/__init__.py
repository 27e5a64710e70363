"""A step of a pipeline on one rank: the timetable of the core, carried out.

transfers.py  what is sent to the neighbouring stages and received from them
passes.py     the forward pass of a stage for one microbatch, and its backward pass, whole or in halves
timetable.py  the actions of a rank, one after the other
tied.py       weights that two stages have
"""
