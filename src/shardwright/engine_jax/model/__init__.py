"""The whole model, from tokens to logits.

forward.py  both ends, and a scan over each stack of layers
"""
