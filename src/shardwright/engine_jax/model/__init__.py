"""The full model, from tokens to logits.

prepared.py     what is made of a batch once a step
interpreter.py  the operations of a layer or of an end, one after the other
ends.py         the embedding, and the logits with their loss
forward.py      the embedding, each stack of layers, and the logits
scan.py         scans over the layers of a stack
"""
