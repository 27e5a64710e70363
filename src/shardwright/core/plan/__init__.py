"""What follows from the specs: the plan, its collectives, its memory, and what an engine does not run.

plan.py               the plan, the one object that every other layer reads
movement.py           the steps from one spec to another
resharding.py         the steps of a tensor forward, and of its gradient backward
collectives.py        every collective of a training step
fsdp_groups.py        which weights are one FSDP parameter group
memory.py             bytes on one device
moe_move.py           tokens or weights: which of them travel
attention_kernels.py  by which algorithm a device attends
expert_kernels.py     by which algorithm a device multiplies rows with their experts
gate.py               the errors that keep a run from starting
"""
