"""What tables of several families share: rows of attention, feed-forward layers, experts, embedding and logits.

architecture.py      what the computation needs beyond shapes
assemble.py          from an architecture to its table
size.py              a named size of a family
rope.py              frequencies of rotary embeddings
rows.py              helpers that make rows
ends.py              rows of the embedding and the logits
attention.py         rows of grouped-query attention
latent_attention.py  rows of latent attention
feed_forward.py      rows of SwiGLU layers
experts.py           rows of the router and of experts
"""
