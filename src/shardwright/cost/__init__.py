"""What hardware can do, as numbers with their sources.

chips.toml  one table of chips
"""

from shardwright.cost.chips import read_chips

__all__ = ["read_chips"]
