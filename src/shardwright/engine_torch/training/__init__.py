"""The training step, its state, and what a run asks of this engine.

run.py         the engine of a run
step.py        gradients and one training step
optimizer.py   AdamW
state.py       weights, moments and buffers where the plan says, in boxes for checkpoints
feed.py        rows to ranks
processes.py   ranks, connected
"""
