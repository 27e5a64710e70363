"""What a run is told and trains by, the same for both engines. Standard library only.

options.py     the options of a run, its progress and its outcome
optimizer.py   AdamW's constants, the schedule, which weights they are for
cluster.py     which processes run together: torchrun, Slurm, Open MPI, or said by hand
"""
