"""Which checkpoints of a run are kept: rules, and what follows from them. No file is read or deleted here.

rules.py  the rules, and whether they can be applied to a save
kept.py   which steps the rules keep, and why
"""
