"""Reading a checkpoint: any box of any tensor, and not more of its files than that needs.

opened.py    an open checkpoint: any box of any tensor
files.py     the files of an open checkpoint against their digests
streams.py   reads of regions of stored boxes, piece by piece
stored.py    the boxes in which a tensor is stored
small.py     reads of small tensors, of all layers at once
casting.py   elements in another floating-point dtype
expected.py  the tensors that a program expects against those of a checkpoint
"""
