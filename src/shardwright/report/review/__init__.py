"""What moved between two plans, as people see it.

difference_view.py  tensor by tensor
check_view.py       how one lock stands
"""
