"""What every view is made of: columns, numbers, colours, widths.

columns.py        groups of rows with the same columns, lines with labels
units.py          numbers with units
notation_text.py  a spec in colours
wrapping.py       lines that are broken between words
terminal.py       from a view to the text for one stream
"""
