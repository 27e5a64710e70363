"""A plan in a file that people commit, and what has changed since.

lock.py           a lock, made and read
lock_request.py   what a lock asks of the planner
saved_plan.py     the type of every field of a saved plan
difference.py     what moved between two plans
field_changes.py  two JSON values leaf by leaf
plan_fields.py    every field of two plans that differs
review.py         what the review of a change has to say
"""
