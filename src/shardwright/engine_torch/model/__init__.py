"""The whole model, from tokens to the loss.

forward.py  both ends, and each layer of each stack
model.py    the same as modules, with the weights of this rank
"""
