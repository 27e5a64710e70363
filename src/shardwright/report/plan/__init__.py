"""A plan as people see it.

plan_view.py         its parts, one under another
head.py              model, layout, mesh, batch, groups
roles_view.py        what every axis does in every component
tensor_tables.py     weights and activations
collectives_view.py  what crosses the links
memory_view.py       bytes on one device
findings_view.py     findings, with carets
"""
