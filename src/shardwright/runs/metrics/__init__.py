"""The metrics of a run: the record of each step, and the files that they are written to.

records.py  the metrics and the record of a step
rates.py    what a step's time means for each device
run_record.py  what a run was started with, and how it ended
journal.py  metrics.jsonl and TensorBoard
earlier.py  which lines of an earlier run's metrics are kept
"""
