"""Which device owns which box of a tensor.

box.py         a rectangular part of a tensor
boxes.py       what a spec gives each device, and what changes owner
placements.py  a spec as PyTorch's DTensor placements
stored.py      a weight in the dims in which PyTorch stores it
coverage.py    whether boxes make the whole tensor, each index once
"""
