"""The checkpoints of a run: saves of one or of several processes, asynchronous ones, and where a run begins.

saving.py      saves of one or of several processes
background.py  asynchronous saves
resuming.py    at which checkpoint, or with which weights, a run begins
"""
