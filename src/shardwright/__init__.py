"""Shardwright: one declaration of a layout, checked, costed and run unchanged on JAX and PyTorch."""
