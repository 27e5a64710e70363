"""How plans, differences, findings and checkpoints look to people. Text in, text out; nothing is decided here.

plan_view.py        a whole plan: its parts one under another
head.py             model, layout, mesh, batch, what was chosen by default, groups
roles_view.py       the roles, axes by components
tensor_tables.py    weights and activations, grouped
collectives_view.py what crosses the links
memory_view.py      bytes on one device
findings_view.py    findings, with carets
compile_view.py     what a compiler made of a plan: agreement_view.py, compiled_memory_view.py
difference_view.py  what moved between two plans
checkpoint_view.py  what a checkpoint holds
notation_text.py    a spec in colours, one for each axis
units.py            bytes, counts and times as people read them
terminal.py         from what rich draws to text for one stream
"""
