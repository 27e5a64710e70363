"""Words, columns and colours that every view is made of.

columns.py        groups of rows with the same columns
units.py          numbers as people read them
notation_text.py  a spec in colours
terminal.py       from what rich draws to text for one stream
"""
