"""The full model, from tokens to the loss.

interpreter.py  the operations of a walk, bound to their primitives when a model is built
prepared.py     what is made of a batch for all layers
forward.py      one layer, and the two ends
stage.py        a stage as modules with their weights: the embedding, each layer of each stack, the final norm, the loss
model.py        the stages of a rank: one that is the entire model, without a pipeline
"""
