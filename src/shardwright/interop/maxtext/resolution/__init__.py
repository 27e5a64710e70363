"""Resolution of MaxText's rules.

annotations.py      the logical names of each tensor's dims
tensors.py          the annotated tensors of a step
flax_resolution.py  the rules applied to one tensor, in Flax's two dialects
placement.py        the axes of each tensor's dims
"""
