"""The layout language: each mesh axis with one role in each component.

roles.py         the role table
layout.py        a layout, read
reading.py       from values of a file to a layout
role_reading.py  the roles among them
faults.py        faults of a layout's text, collected while it is read
declaration.py   what a layout declares, as plain data
wording.py       numbers and lists as findings write them
"""
