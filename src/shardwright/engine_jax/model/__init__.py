"""The full model, from tokens to logits.

forward.py  the embedding, a scan over each stack of layers, the final norm and the logits
"""
