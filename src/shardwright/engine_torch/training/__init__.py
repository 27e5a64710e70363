"""The training step, its state, and the PyTorch engine of a run.

run.py         the engine of a run
step.py        gradients and one training step
optimizer.py   AdamW
state.py       weights, moments and buffers, sharded as the plan says, and their boxes for checkpoints
feed.py        the rows of a step, put on ranks
processes.py   how ranks connect
"""
