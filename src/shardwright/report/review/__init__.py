"""Views of the differences between two plans.

difference_view.py  tables of what moved
comparison_view.py  several plans, a column each
answers_view.py     memory, time and cost of plans, side by side
check_view.py       the result for one lock
"""
