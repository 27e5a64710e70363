"""The training step, its state, and the PyTorch engine of a run.

run.py         the engine of a run
step.py        gradients and one training step
optimizer.py   clipping, an optimizer by name, the average of the weights
named_optimizer.py  an optimizer of torch.optim by its name there
state.py       weights, what the optimizer keeps, and buffers, sharded as the plan says, and their boxes for checkpoints
feed.py        the rows of a step, put on ranks
processes.py   how ranks connect
measure.py     seconds of products, attention, copies and collectives on the ranks that are there, for `calibrate`
"""
