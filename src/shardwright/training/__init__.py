"""The options, the optimizer and the processes of a run, the same for both engines. Standard library only.

options.py     the options of a run, its progress and its outcome
optimizer.py   the learning rate, the average of the weights, and the weights that are decayed or frozen
optimizers.py  the optimizers that both engines have, by name: constants, state and formula
named.py       an engine's own optimizers by name: constants, and why one is refused
arithmetic.py  the functions of a formula, for one type of numbers
changes.py     what may change when a run goes on
effects.py     what a change does to the next step, as lines to show
started.py     how the run in a folder was started
partial.py     which weights come from elsewhere
published.py   what was published with weights: names in a checkpoint, files in a run's folder
cluster.py     the processes of a run: from options, torchrun, Slurm, Open MPI, TPU hosts or Kubernetes
"""
