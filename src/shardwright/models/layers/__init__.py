"""The layers of a decoder as programs of named operations, in the order of their computation, each written once.

attention.py         grouped-query attention
latent_attention.py  multi-head latent attention
feed_forward.py      SwiGLU layers
experts.py           the router and its experts
ends.py              embedding, final norm, logits and loss
decoder.py           a model of any family
table.py             from an architecture to its table
published.py         names of weights in published checkpoints that families share
"""
