"""The full model, from tokens to the loss.

forward.py  one layer
stage.py    a stage as modules with their weights: the embedding, each layer of each stack, the final norm, the loss
model.py    the stages of a rank: one that is the entire model, without a pipeline
"""
