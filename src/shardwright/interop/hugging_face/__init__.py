"""Hugging Face: a ``config.json`` as a model of our table, and a tensor-parallel plan as a layout.

importing.py       from a file to a model, a layout, or both
published.py       `config.json` as text and values, with positions
keys.py            what each key of each type is here: computed, refused, of training only, or nothing
missing_parts.py   types that are refused, and the parts that our tables lack for them
rope.py            the positions of a `config.json`
besides.py         findings on what a `config.json` has besides
config.py          `config.json` as the dimensions of a family
written_config.py  its inverse: the `config.json` of an architecture
hub_names.py       names on the Hub, and our models of them
tp_plan.py         a tensor-parallel plan as a layout
command.py         the model as a command line
weights/           the weights of a model folder: from it to a checkpoint, and back
"""
