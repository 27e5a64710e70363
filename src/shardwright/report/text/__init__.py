"""What every view is made of: columns, numbers, colours, widths.

columns.py        groups of rows with the same columns
units.py          numbers with units
notation_text.py  a spec in colours
terminal.py       from rich's drawing to the text for one stream
"""
