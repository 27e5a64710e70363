"""The metrics of a run: the record of each step, and the files that they are written to.

records.py  the metrics and the record of a step
journal.py  metrics.jsonl and TensorBoard
earlier.py  which lines of an earlier run's metrics are kept
"""
