"""The layers that every family has.

chunked_loss.py  the loss with the logits of one chunk of tokens at a time
elementwise.py   sums, biases, factors, caps, and values side by side
embedding.py     tokens to the residual stream, and the stream to logits
gate.py          gated hidden units
loss.py          cross-entropy, also over a sharded vocabulary
norm.py          RMS normalization
product.py       products whose result has a wider dtype than the operands
rotate.py        rotary position embeddings
"""
