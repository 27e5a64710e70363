"""Reports to the user: findings with stable codes, errors, and the place in a text that they are about.

errors.py      exceptions for errors that a user can correct
finding.py     one finding, with law, place, found, needed, fix and cost
effect.py      a step before and after a fix
codes.py       every code with its severity and law
thresholds.py  the numbers that decide a severity
draft.py       a finding before its fix is selected
position.py    where a value is in a user's text
nearest.py     the known name closest to a misspelt one
patterns.py    names by patterns
bounds.py      upper bounds of input numbers
escaped.py     texts of unknown origin, without control characters
"""
