"""Views of the differences between two plans.

difference_view.py  tables of what moved
check_view.py       the result for one lock
"""
