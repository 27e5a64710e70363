"""What chips make of a plan: the time of a step, and the answer to who asks for it.

step_cost.py  the time of a step, by what it is spent on
answer.py     whether a plan fits, its speed, and the days and the cost of a training
"""
