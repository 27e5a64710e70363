"""The training step, its state, and what a run asks of this engine.

run.py         the engine of a run
step.py        gradients and one training step
optimizer.py   AdamW
state.py       weights, moments and buffers where the plan says
snapshot.py    the state in boxes, for checkpoints
feed.py        rows to devices
processes.py   several processes, connected
"""
