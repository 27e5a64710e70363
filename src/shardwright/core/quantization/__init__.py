"""What a recipe of low precision means under a layout: what is quantized, and who must agree on what.

quantized.py  the quantized operands of each weight's products
products.py   which weights are quantized, and the dims of their products on the mesh
amax.py       which devices agree on an amax, and how many values they exchange
freedom.py    whether the layout can move what is quantized
units.py      shards that end inside a block
links.py      what the all-gathers of a weight send
dispatch.py   what is sent to experts as codes
reductions.py the reductions of amaxes in a step
delayed.py    what a run keeps for delayed amaxes, tensor by tensor
elements.py   which elements of a global operand a device has, for random numbers
derivation.py from a request to the quantized weights
"""
