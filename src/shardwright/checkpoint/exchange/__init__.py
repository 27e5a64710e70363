"""Loads by several processes: what several need is read by one of them, which passes it on.

wants.py     which process needs which boxes of a tensor
units.py     the units of stored boxes that are read at one time, and who needs a part of each
schedule.py  who reads each unit, and in which round it is passed on
passing.py   reads by the schedule, over the collectives that the processes have
loads.py     what a load reads, from the index alone
"""
