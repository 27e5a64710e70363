"""The layers that every family has: embedding, norm, products, rotary angles, MLP, loss."""
