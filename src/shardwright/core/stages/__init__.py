"""The stages of a pipeline: which units of the model each has, and what it needs.

units.py       the embedding, layers and logits, with their work
assignment.py  which units each stage has
notation.py    Megatron's notation of that
submodel.py    a stage as a model of its own
gathering.py   when PyTorch gathers a stage's weights and reduces their gradients
padded.py      the layers of a stack in the arrays of one program for all stages
choice.py      what the user asked for and what follows, or why it cannot be
planned.py     the pipeline of a plan: bytes and work of each stage and rank, the fullest rank and the slowest
"""
