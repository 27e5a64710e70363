"""The boxes of all devices at once are those of each device."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from shardwright.core.boxes.box import Box
from shardwright.core.plan.saved_boxes import UPDATE, owned_at_rest, saved_boxes
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build
from tests.sameness.own_layouts import own_layout

SETTINGS = {
    "llama3-test": {
        "num_layers": "2",
        "embed": "24",
        "num_heads": "6",
        "num_kv_heads": "2",
        "mlp": "40",
        "vocab": "50",
    },
    "mixtral-test": {"num_layers": "2", "embed": "16", "mlp": "24", "vocab": "40"},
    "deepseek3-test": {},
}
CASES = [
    ("llama3-test", "fsdp", {"fsdp": 7}),
    ("llama3-test", "hsdp", {"data": 2, "fsdp": 2}),
    ("llama3-test", "fsdp-tp", {"fsdp": 5, "tensor": 2}),
    ("mixtral-test", "ep", {"fsdp": 2, "expert": 4}),
    ("deepseek3-test", "ep", {"fsdp": 2, "expert": 2}),
    ("llama3-test", "hsdp-zero1", {"data": 3, "fsdp": 2}),
    ("llama3-test", "zero-tp", {"data": 2, "replica": 2, "tensor": 2}),
]


@pytest.mark.parametrize("engine", ["jax", "torch"])
@pytest.mark.parametrize(("model", "layout", "sizes"), CASES)
def test_all_devices_at_once(engine: str, model: str, layout: str, sizes: dict[str, int]) -> None:
    table = build(model, SETTINGS[model])
    request = Request(
        layout=load_layout(layout) if layout in preset_names() else own_layout(layout),
        table=table,
        batch=8,
        length=64,
        mesh_sizes=sizes,
        engine=engine,  # pyright: ignore[reportArgumentType]
    )
    plan = make_plan(request)
    found = dict(owned_at_rest(plan))
    updates = {row.name for row in plan.weights if row.update_is_sharded}
    assert bool(updates) == ("zero" in layout)
    assert set(found) == {weight.name for weight in table.weights} | {UPDATE + name for name in updates}
    for device in range(prod(sizes.values())):
        needed: dict[str, list[Box]] = {name: [] for name in found}
        for one in saved_boxes(plan, device):
            needed[one.weight].append(one.box)
        for name in found:
            weight = table.weight(name.removeprefix(UPDATE))
            shape = (weight.num, *weight.shape) if weight.stack else weight.shape
            ours = list(found[name][device])
            assert np.array_equal(counts(shape, ours), counts(shape, needed[name])), (name, device)
            assert counts(shape, ours).max(initial=0) <= 1
            if name.startswith(UPDATE):
                # A device updates elements that it holds.
                at_rest = counts(shape, list(found[weight.name][device]))
                assert np.all(counts(shape, ours) <= at_rest)


def test_updates_have_each_element_once() -> None:
    table = build("llama3-test", SETTINGS["llama3-test"])
    for engine in ("jax", "torch"):
        request = Request(
            layout=own_layout("hsdp-zero2"),
            table=table,
            batch=12,
            length=64,
            mesh_sizes={"data": 3, "fsdp": 2},
            engine=engine,
        )
        plan, saved = make_plan(request), {}
        for device in range(6):
            for one in saved_boxes(plan, device):
                if one.saves:
                    saved.setdefault(one.weight, []).append(one.box)
        for weight in table.weights:
            shape = (weight.num, *weight.shape) if weight.stack else weight.shape
            for name in {weight.name, UPDATE + weight.name} & set(saved):
                assert np.all(counts(shape, saved[name]) == 1), name


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of the boxes have each element."""
    found = np.zeros(shape, np.int8)
    for box in boxes:
        found[(*box.slices, ...)] += 1
    return found
