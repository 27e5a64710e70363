"""The layers that every family has.

embedding.py  tokens to the residual stream, and the stream to logits
loss.py       cross-entropy, over a sharded vocabulary too
mlp.py        SwiGLU
norm.py       RMS normalisation
product.py    products whose result is wider than what is multiplied
rotary.py     rotary position embeddings
"""
