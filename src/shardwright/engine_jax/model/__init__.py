"""The full model, from tokens to logits.

forward.py  the embedding, each stack of layers, the final norm and the logits
scan.py     scans over the layers of a stack
"""
