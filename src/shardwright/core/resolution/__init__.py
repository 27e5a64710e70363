"""From a request to the spec of each tensor.

request.py      what is planned: model, layout, devices, batch
mesh_sizes.py   the size of each mesh axis
resolve.py      the spec of each tensor, with every axis granted or refused; and the order on heads and groups of tokens
token_hops.py   the exchanges by which tokens go to their experts: one hop, or two by way of nodes
storage.py      the dim that is sharded at rest and gathered for use
order.py        the order of several axes on one dim: persistent, then gathered
row_order.py    the order of a row's tokens over the devices that share it
padding.py      the size of a vocabulary in memory, where its axes do not divide it
gradients.py    how each weight's gradient is reduced over each axis
update.py       how its update is sharded over replicas of the weight
own_model.py    a user's own model as a table
"""
