"""The cases of updates that an axis shards and weights that it does not."""

from __future__ import annotations

from shardwright.training.optimizers import optimizer_of
from tests.golden.findings_case import Case, mine

EIGHT = {"devices": 8}
FSDP = mine("fsdp: fsdp", "{fsdp: auto}")
ZERO1 = mine("data: {elsewhere: data, optimizer: shard}", "{data: auto}")
ZERO2 = mine("data: {elsewhere: data, optimizer: shard, gradients: shard}", "{data: auto}")

OF_UPDATES: tuple[Case, ...] = (
    Case(
        name="SW119-update-without-replicas",
        layout=mine("fsdp: {elsewhere: fsdp, optimizer: shard}", "{fsdp: auto}"),
        neighbour={"layout": FSDP},
    ),
    Case(
        name="SW119-gradients-alone",
        layout=mine("data: {elsewhere: data, gradients: shard}", "{data: auto}"),
        neighbour={"layout": ZERO2},
    ),
    Case(
        name="SW120-update",
        layout=mine("data: {elsewhere: data, optimizer: true}", "{data: auto}"),
        neighbour={"layout": ZERO1},
    ),
    Case(
        name="SW124-no-weight",
        layout=ZERO1,
        options={"devices": 7, "batch": 14},
        neighbour={"options": {"devices": 8, "batch": 16}},
    ),
    Case(
        name="SW124-no-dim",
        model="deepseek3-test q_lora=36",
        layout=ZERO1,
        options=EIGHT,
        neighbour={"model": "deepseek3-test"},
    ),
    Case(
        name="SW124-nothing-kept",
        layout=ZERO1,
        options={**EIGHT, "optimizer": optimizer_of("sgd", {"momentum": "0"})},
        neighbour={"options": EIGHT},
    ),
)
