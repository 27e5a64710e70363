"""The numbers of each chip with their sources, and the time of a plan on a machine. docs/cost.md is its page.

chips.py        the table of chips, chips.toml: flops, memory, links, each with its source
machine.py      the machine that --chips gives: a kind of chip and a shape
links.py        which links the axes of a mesh use
collectives.py  seconds of one collective, in closed form
flops.py        what one device computes in a step
precision.py    seconds of products under a recipe, and bytes of quantization
step.py         the time of a step: compute and exposed communication
pipeline.py     the time of a step in stages, by their timetable
moe.py          moving tokens or expert weights, by time
topology.py     SW201, SW202, SW204
price.py        adds all of these to a plan
wording.py      seconds and rates as findings write them
"""

from shardwright.cost.machine import Machine, read_machine
from shardwright.cost.price import price

__all__ = ["Machine", "price", "read_machine"]
