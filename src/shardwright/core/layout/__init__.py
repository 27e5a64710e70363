"""The layout language: each mesh axis with one role in each component.

roles.py         the role table
layout.py        a layout
reading.py       a layout from the values of a file
role_reading.py  the roles from the values of a file
faults.py        faults of a layout's text, collected while reading
declaration.py   a layout as plain data, and its changes
auto.py          what `auto` chose
wording.py       text of numbers and lists in findings
"""
