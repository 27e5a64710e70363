"""MaxText: ordered rules from logical names to mesh axes, as its configuration files state them.

importing.py   from files to an imported configuration
sources.py     which files are read
model.py       the model of a configuration
without_table.py  what rules say by names, where no table has the model
roles.py       rules as a layout in roles
planning.py    the request of a configuration's step
comparison.py  the layout compared with the rules, tensor by tensor
export.py      a layout as rules
stages.py      the settings of a pipeline, read and written
policy.py      the policy of recomputation, read and written
"""
