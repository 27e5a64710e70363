"""A plan in stages: each stage is planned as a model of its own, and what follows for the ranks.

requests.py  the requests of stages
ends.py      the ends that all stages share
program.py   the one program of all stages, as JAX runs them: its ticks, its arrays and its collectives
tied.py      weights that two stages have
derived.py   from the plans of stages to the pipeline of the plan (`core/stages/planned.py`), and a rank's collectives
"""
