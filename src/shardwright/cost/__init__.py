"""What hardware can do, as numbers with their sources, and what a plan costs on it. docs/cost.md is its page.

chips.toml      one table of chips, read by chips.py
machine.py      so many chips in a shape: what --chips says
links.py        which links the axes of a mesh cross
collectives.py  seconds of one collective, in closed form
flops.py        what one device computes in a step
step.py         a step: what hides behind what
moe.py          tokens or weights, by time
topology.py     SW201, SW202, SW204
price.py        all of it, on a plan
wording.py      seconds and rates as findings write them
"""

from shardwright.cost.machine import Machine, read_machine
from shardwright.cost.price import price

__all__ = ["Machine", "price", "read_machine"]
