"""The options, the optimizer and the processes of a run, the same for both engines. Standard library only.

options.py     the options of a run, its progress and its outcome
optimizer.py   AdamW's constants, the learning rate, and the weights that are decayed or frozen
published.py   what was published with weights: names in a checkpoint, files in a run's folder
cluster.py     the processes of a run: from options, torchrun, Slurm, Open MPI, TPU hosts or Kubernetes
"""
