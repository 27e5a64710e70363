"""What the models of several families share besides their layers: their numbers.

architecture.py  what the computation needs beyond shapes
size.py          a named size of a family
rope.py          frequencies of rotary embeddings
"""
