"""What a user is told: findings with stable codes, errors, and the place in a text that they are about.

errors.py      exceptions for what a user can mend
finding.py     one finding, in five parts
codes.py       every code with its severity and law
draft.py       a finding before its fix is chosen
position.py    where a value stands in a user's text
nearest.py     the known name that a misspelt one most likely meant
bounds.py      numbers too large to be meant
"""
