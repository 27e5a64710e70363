"""MaxText's configuration files, parsed and merged.

reading.py           one file
merging.py           several into one configuration
rules.py             one line of a list of rules
sizes.py             sizes of the mesh axes
pipeline.py          changes that pipeline stages make
model_files.py       the contents of its own files for the models that have a table here
presets.py           its own presets that have a layout here
known_keys.py        every key that it has
step_keys.py         keys that change a step and that no plan carries over
vocabulary.py        mesh axes, logical names, settings
model_vocabulary.py  decoders and dimensions
"""
