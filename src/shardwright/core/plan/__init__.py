"""What follows from the specs: the plan, its collectives, memory, FSDP groups and kernels, and the gate before a run.

plan.py               the plan, the one object that every other layer reads
movement.py           the steps from one spec to another
resharding.py         the steps of a tensor in the forward pass, and of its gradient in the backward pass
collectives.py        every collective of a training step
fsdp_groups.py        which weights form one FSDP parameter group, and which are updated together
saved_boxes.py        the boxes that each device has at rest, as a checkpoint holds them
memory.py             bytes on one device
moe_move.py           whether tokens are sent to experts or the experts' weights gathered
attention_kernels.py  which attention kernel a device uses under JAX
expert_kernels.py     which kernel a device uses for its experts' products
gate.py               the errors that keep a run from starting
"""
