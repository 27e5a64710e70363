"""What each process needs under a plan, against the boxes of its devices one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.checkpoint.exchange.wants import wants_of, wants_of_plan
from shardwright.core.engines.engines import Engine
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import owned_at_rest, saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout
from shardwright.models import build

PLACES: list[tuple[Engine, str, dict[str, int]]] = [
    ("jax", "fsdp-tp", {"fsdp": 4, "tensor": 2}),
    ("jax", "hsdp", {"data": 2, "fsdp": 4}),
    ("torch", "fsdp-tp", {"fsdp": 2, "tensor": 2}),
]
PROCESSES: dict[str, Callable[[int], int]] = {
    "a device each": lambda device: device,
    "in another order": lambda device: device ^ 3,
    "two devices each": lambda device: device // 2,
    "the first for all": lambda _: 0,
}


def plan_of(engine: Engine, layout: str, sizes: dict[str, int]) -> Plan:
    table = build("llama3-test", {"num_layers": "2", "embed": "48", "mlp": "96", "vocab": "50"})
    return make_plan(
        Request(layout=load_layout(layout), table=table, batch=8, length=64, mesh_sizes=sizes, engine=engine)
    )


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_process_needs_the_boxes_of_its_devices(
    place: tuple[Engine, str, dict[str, int]], processes: str
) -> None:
    plan, process_of = plan_of(*place), PROCESSES[processes]
    found = wants_of_plan(plan, process_of)
    for name, owned in owned_at_rest(plan):
        pairs = [(process_of(device), box) for device, boxes in enumerate(owned) for box in boxes]
        assert found[name] == wants_of(pairs)
    if place[0] == "jax":
        for device in range(plan.mesh.num_devices):
            for one in saved_boxes(plan, device):
                [want] = [want for want in found[one.weight] if process_of(device) in want.processes]
                assert one.box in want.boxes
