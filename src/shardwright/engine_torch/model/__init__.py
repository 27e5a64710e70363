"""The whole model: layers one after the other, from tokens to logits, and as a module."""
