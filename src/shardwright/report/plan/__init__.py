"""The view of a plan.

plan_view.py         its parts, in order
answer_view.py       whether it fits, how long a step takes, what the training costs
head.py              model, layout, mesh, batch, groups
roles_view.py        the role of every axis in every component
tensor_tables.py     weights and activations
collectives_view.py  the collectives of a step
memory_view.py       bytes on one device
pipeline_view.py     the stages of a pipeline
choices_view.py      what was chosen by cost, with all options
findings_view.py     findings, with carets
"""
