"""The layers that every family has.

chunked_loss.py  the loss with the logits of one chunk of tokens at a time
elementwise.py   sums, biases, factors, caps, and values side by side
embedding.py     tokens to the residual stream, and the stream to logits
gate.py          gated hidden units
loss.py          cross-entropy, also over a sharded vocabulary
norm.py          RMS normalization
order.py         in which order the backward pass makes zeros and gradients
product.py       products of tokens and weights, with those of their backward pass
rotate.py        rotary position embeddings
"""
