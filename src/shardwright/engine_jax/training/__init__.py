"""The training step, its state, and the JAX engine of a run.

run.py         the engine of a run
step.py        gradients and one training step
optimizer.py   clipping, an optimizer by name, the average of the weights
named_optimizer.py  an optimizer of optax by its name there
elementwise.py      whether functions of arrays treat each element alike, and what they depend on
state.py       weights, what the optimizer keeps, and buffers, sharded as the plan says
snapshot.py    the state in boxes, for checkpoints
feed.py        the rows of a step, put on devices
processes.py   how several processes connect
measure.py     seconds of products, attention, copies and collectives on the devices that are there, for `calibrate`
"""
