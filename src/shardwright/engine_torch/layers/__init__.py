"""The layers that every family has.

chunked_loss.py  the loss with the logits of one chunk of tokens at a time
embedding.py     tokens to the residual stream, and the stream to logits
loss.py          cross-entropy, also over a sharded vocabulary
mlp.py           SwiGLU
norm.py          RMS normalization
product.py       products whose result has a wider dtype than the operands
rotary.py        rotary position embeddings
"""
