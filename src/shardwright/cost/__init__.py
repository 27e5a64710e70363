"""What hardware can do, as numbers with their sources, and what a plan costs on it.

chips.toml  one table of chips, read by chips.py
machine.py  so many chips in a shape
"""

from shardwright.cost.machine import Machine, read_machine
from shardwright.cost.price import price

__all__ = ["Machine", "price", "read_machine"]
