"""Loads by several processes: what several need is read by one of them, which passes it on.

wants.py        which process needs which boxes of a tensor
units.py        the units of stored boxes that are read at one time
links.py        which boxes need a part of which others
groups.py       the units of a tensor in groups that the same processes need
rings.py        who of a group reads each unit, and in which round it is passed on
schedule.py     the part of one process
collectives.py  permutes or an all-to-all for what a ring sends in a round, under JAX
passing.py      reads by the schedule, over the collectives that the processes have
loads.py        what a load reads, from the index alone
"""
