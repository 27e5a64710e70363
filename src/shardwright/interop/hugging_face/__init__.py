"""Hugging Face: a ``config.json`` as a model of our table, and a tensor-parallel plan as a layout.

importing.py       from a file to a model, a layout, or both
config.py          `config.json` as the dimensions of a family
written_config.py  its inverse: the `config.json` of an architecture
tp_plan.py         a tensor-parallel plan as a layout
command.py         the model as a command line
weights/           the weights of a model folder: from it to a checkpoint, and back
"""
