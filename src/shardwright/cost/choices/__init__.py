"""What `auto` chooses by time: the option with the fewest seconds, with the seconds of all.

hops.py  collectives over an entire TPU slice: in one, in two hops or in chunks
moe.py   moving tokens, in one hop or two, or expert weights
"""
