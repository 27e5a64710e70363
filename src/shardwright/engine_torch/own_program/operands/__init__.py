"""What a user's own module multiplies, over axes that shard its weights in use and whose ranks have the same tokens.

entries.py      which modules convert their inputs and outputs
conversions.py  a module's inputs, weights and outputs, before and after its forward pass
mixing.py       operations that mix sharded and plain tensors, and attention by heads
fused.py        nn.MultiheadAttention by heads
"""
