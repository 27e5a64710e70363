"""A plan in stages: each stage is planned as a model of its own, and what follows for the ranks.

requests.py  the requests of stages
ends.py      the ends that all stages share
derived.py   from the plans of stages to the pipeline of the plan (`core/stages/planned.py`), and a rank's collectives
"""
