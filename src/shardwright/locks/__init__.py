"""A plan in a file that is committed, and what has changed since.

lock.py           a lock: made, written and read
lock_request.py   the request for which a lock was planned
saved_plan.py     the type of every field of a saved plan
difference.py     whether and how two plans differ: tensors, collectives, memory
field_changes.py  the differences between two JSON values, leaf by leaf
plan_fields.py    differences in all other fields
review.py         the findings of a review
"""
