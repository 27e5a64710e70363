"""What MaxText makes of its rules.

annotations.py      the logical names of each tensor's dims
tensors.py          the tensors of a step, as it tags them
flax_resolution.py  what rules make of one tensor, in Flax's two dialects
placing.py          where each tensor ends up
"""
