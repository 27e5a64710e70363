"""Copies that PyTorch's ``fully_shard`` makes around its collectives: a gather fills one buffer, shard by shard, and a scatter takes one.

| collective | copy | where |
|---|---|---|
| an all-gather of a group's weights | the buffer is read, and each weight is written where products read it | before the products of the group |
| a reduce-scatter of their gradients | the gradients are read in the dtype of the computation, and the buffer is written in float32 | after them |

Source: ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` of PyTorch 2.11, ``split_with_sizes_copy`` and ``chunk_cat``. What a device's shards are copied
into the buffers is left out: it is smaller by the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Phase, Plan
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.steps.precision import moving_seconds

Seconds = Mapping[tuple[str, Phase], float]
"""By component and phase."""


def with_copies(
    computing: Seconds, plan: Plan, chip: ChipNumbers, reading: Reading, shares: Sequence[float] | None = None
) -> Seconds:
    """The seconds that a device computes, with those of the copies. ``shares``: how often each collective of the plan counts, if not once."""
    if not plan.request.properties.gathers_together:
        return computing
    found = dict(computing)
    sharded = {tensor.name for tensor in plan.weights if tensor.shard_group}
    for position, one in enumerate(plan.collectives):
        if one.phase == "update" or not sharded.issuperset(one.tensors):
            continue
        if one.kind == "all-gather":
            passes = 2.0
        elif one.kind == "reduce-scatter":
            passes = 1.0 + DTYPE_BYTES[plan.request.dtype] / DTYPE_BYTES["float32"]
        else:
            continue
        count = one.count_per_step * (1.0 if shares is None else shares[position])
        where = one.component, one.phase
        found[where] = found.get(where, 0.0) + moving_seconds(chip, passes * one.bytes_per_device * count, reading)
    return found
