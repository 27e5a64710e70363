"""What a search tries.

arrangements.py  a layout on a machine with sizes of its axes, and a few that suit a machine
forms.py         role tables, and the orders of their axes
space.py         every layout of the forms on a machine, without those that arithmetic ends
settings.py      all else that is chosen for a layout, and the request that it makes
policies.py      policies of recomputation
"""

from shardwright.search.space.arrangements import Arrangement, arrangements, presets_for
from shardwright.search.space.policies import TriedPolicy, policies_of
from shardwright.search.space.settings import LOSS_CHUNKS, Free, Setting
from shardwright.search.space.space import Space, space_of

__all__ = [
    "LOSS_CHUNKS",
    "Arrangement",
    "Free",
    "Setting",
    "Space",
    "TriedPolicy",
    "arrangements",
    "policies_of",
    "presets_for",
    "space_of",
]
