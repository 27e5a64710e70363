"""Which device owns which box of a tensor.

box.py         a rectangular region of a tensor
boxes.py       the box of each device under a spec, and which replica saves it
placements.py  a spec as DTensor placements of PyTorch
reloading.py   what PyTorch's checkpoint makes of a dim that tensor parallelism does not divide
held.py        the boxes that a rank really holds, from its placements and its shape
stored.py      boxes of a weight in the dims that PyTorch stores
coverage.py    whether boxes cover a tensor, each index once
"""
