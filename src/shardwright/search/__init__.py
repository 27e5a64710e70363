"""Which layout a model has on a machine: the fastest of all, of a few where nobody says one, or of those near to one. docs/search.md is its page.

defaults.py    the fastest of a few that is valid and fits, where nobody says a layout
nodes.py       sets of candidates
solving.py     bounds and solutions of a candidate
staged.py      bounds of candidates in stages
pipelines.py   what a pipeline takes at least, by the costs of its units
searching.py   the candidate of the least bound first, until nothing that is left can be faster
answers.py     answers as plans: ranked, with what each loses by
compiled.py    answers beside what compilers made of them, ranked again
neighbours.py  what differs from a plan in one change, and is faster
larger.py      the smallest machine on which something fits
saved.py       the file of a search
"""

from shardwright.search.defaults import Defaults, choose_defaults
from shardwright.search.space.arrangements import Arrangement, arrangements, presets_for

__all__ = ["Arrangement", "Defaults", "arrangements", "choose_defaults", "presets_for"]
