"""What follows from the specs: the plan, its collectives, its memory, and what an engine does not run.

plan.py               the plan, the one object that crosses layers
movement.py           the steps from one spec to another
crossing.py           resharding: a tensor's steps forward, and its gradient's backward
collectives.py        every collective of a training step
together.py           which weights FSDP gathers together
memory.py             bytes on one device
moe_choice.py         tokens or weights: which of them travel
attention_kernels.py  by which algorithm a device attends
expert_kernels.py     by which algorithm a device multiplies rows with their experts
gate.py               the errors that keep a run from starting
"""
