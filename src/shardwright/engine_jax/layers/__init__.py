"""The layers that every family has.

chunked_loss.py  the loss with the logits of one chunk of tokens at a time
embedding.py     tokens to the residual stream, and the stream to logits
loss.py          cross-entropy, also over a sharded vocabulary
mlp.py           SwiGLU
norm.py          RMS normalization
order.py         in which order the backward pass makes zeros and gradients
product.py       products of tokens and weights, with those of their backward pass
rotary.py        rotary position embeddings
"""
