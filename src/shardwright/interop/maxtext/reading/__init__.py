"""MaxText's files as they stand.

reading.py           one file
merging.py           several into one configuration
rules.py             one line of a list of rules
sizes.py             sizes of the mesh axes
pipeline.py          what pipeline stages change
model_files.py       what its own files say of the models that have a table here
vocabulary.py        mesh axes, logical names, settings
model_vocabulary.py  decoders and dimensions
"""
