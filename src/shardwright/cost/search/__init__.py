"""Which layout a model has on a machine where nobody says it.

arrangements.py  layouts with sizes of their axes that suit a machine
defaults.py      the fastest of a few that is valid and fits
"""

from shardwright.cost.search.arrangements import Arrangement, arrangements, presets_for
from shardwright.cost.search.defaults import Defaults, choose_defaults

__all__ = ["Arrangement", "Defaults", "arrangements", "choose_defaults", "presets_for"]
