"""MaxText's configuration files, parsed and merged.

reading.py           one file
merging.py           several into one configuration
rules.py             one line of a list of rules
sizes.py             sizes of the mesh axes
pipeline.py          changes that pipeline stages make
model_files.py       the contents of its own files for the models that have a table here
vocabulary.py        mesh axes, logical names, settings
model_vocabulary.py  decoders and dimensions
"""
