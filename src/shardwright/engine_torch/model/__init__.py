"""The full model, from tokens to the loss.

forward.py  one layer
model.py    the modules of a rank with their weights: the embedding, each layer of each stack, the final norm, the loss
"""
