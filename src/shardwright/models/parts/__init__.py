"""What tables of several families share: rows of attention, feed-forward layers, experts, and the two ends.

architecture.py      what the mathematics needs beyond shapes
assemble.py          from an architecture to its table
size.py              a named size of a family
rope.py              rotary embeddings as numbers
rows.py              the few shapes of row
ends.py              rows of both ends
attention.py         rows of grouped queries
latent_attention.py  rows of latent attention
feed_forward.py      rows of SwiGLU layers
experts.py           rows of the router and of experts
"""
