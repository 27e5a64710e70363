"""A plan in a file that is committed, and what has changed since.

lock.py           a lock: made, written and read
lock_request.py   the request for which a lock was planned
saved_plan.py     the type of every field of a saved plan
difference.py     the differences between two plans
field_changes.py  the differences between two JSON values, leaf by leaf
plan_fields.py    every field that differs between two plans
review.py         the findings of a review
"""
