"""The layers that every family has.

embedding.py  tokens to the residual stream, and the stream to logits
loss.py       cross-entropy, also over a sharded vocabulary
mlp.py        SwiGLU
norm.py       RMS normalization
product.py    products of tokens and weights, with those of their backward pass
rotary.py     rotary position embeddings
"""
