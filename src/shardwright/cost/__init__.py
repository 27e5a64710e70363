"""The numbers of each chip with their sources, and the time of a plan on a machine. docs/cost.md is its page.

stages.py    the units of a pipeline's stages, by time and bytes
topology.py  SW201, SW202, SW204
on_host.py   SW205: copies to the host that take longer than what they save
on_links.py  SW201 of stages: links that are too slow or too fast for them
calibration.py  numbers of chips by measurements on them
exposed.py   SW206: a step that waits for its communication
missing.py   SW207: a step without a time, since a number of the chip is missing
advice.py    prices a fix beside what stands, and says whether it is printed
answer.py    whether a plan fits, its speed, what the step waits for, and the training's days
price.py     adds all of these to a plan
wording.py   seconds and rates as findings write them
"""

from shardwright.cost.hardware.machine import Machine, read_machine
from shardwright.cost.price import price
from shardwright.cost.stages import with_unit_costs

__all__ = ["Machine", "price", "read_machine", "with_unit_costs"]
