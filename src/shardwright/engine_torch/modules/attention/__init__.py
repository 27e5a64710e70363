"""Attention of a rank's heads, and what of it context parallelism shards.

masks.py        the masks by their names: which window and which diagonal they have
tokens.py       where each token of a rank is in its text: in rows, packed, and under context parallelism
arguments.py    what a call gives: formats, lengths of sequences, masks
context.py      attention over all tokens of a group of ranks: all-gather, ring, all-to-all
dot_product.py  DotProductAttention
composed.py     what MultiheadAttention and TransformerLayer have, which are made of it and of other modules
rotary.py       RotaryPositionEmbedding, and queries and keys rotated by it
"""
