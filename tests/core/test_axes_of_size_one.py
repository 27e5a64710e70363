"""An axis of size 1 shards nothing: a plan has the same bytes and collectives with it as without."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.core.plan.plan import Plan

OF_SIZE_ONE = {
    "hsdp without fsdp": ("hsdp", {"data": 8, "fsdp": 1}, "ddp", {"data": 8}),
    "fsdp-tp without fsdp": ("fsdp-tp", {"data": 2, "fsdp": 1, "tensor": 4}, "tp", {"data": 2, "tensor": 4}),
    "tp without tensor": ("tp", {"data": 8, "tensor": 1}, "ddp", {"data": 8}),
    "ep-as-cp without experts": ("ep-as-cp", {"data": 2, "fsdp": 4, "expert": 1}, "hsdp", {"data": 2, "fsdp": 4}),
    "cp-as-ep without context": (
        "cp-as-ep",
        {"data": 1, "fsdp": 2, "context": 1, "expert": 4},
        "ep",
        {"data": 1, "fsdp": 2, "expert": 4},
    ),
    "pp without stages": ("pp", {"stage": 1, "data": 2, "fsdp": 4}, "hsdp", {"data": 2, "fsdp": 4}),
}


def planned(layout: str, sizes: dict[str, int], model: str, **options: object) -> Plan:
    request = sw.Request(
        layout=sw.load_layout(layout),
        table=sw.model_table(model, {"num_layers": "4"}),
        mesh_sizes=sizes,
        batch=32,
        length=128,
        **options,  # pyright: ignore[reportArgumentType]
    )
    return sw.make_plan(request)


def collectives(plan: Plan) -> list[tuple[object, ...]]:
    return sorted(
        (
            one.component,
            one.phase,
            one.kind,
            plan.mesh.larger_than_one(one.axes),
            one.bytes_per_device,
            one.count_per_step,
        )
        for one in plan.collectives
    )


@pytest.mark.parametrize(
    ("model", "engine"), [("llama3-test", "torch"), ("mixtral-test", "jax"), ("deepseek3-test", "jax")]
)
@pytest.mark.parametrize("case", OF_SIZE_ONE)
def test_an_axis_of_size_one_changes_no_figure(case: str, model: str, engine: str) -> None:
    first, sizes, second, fewer = OF_SIZE_ONE[case]
    for options in ({}, {"microbatches": 2, "weights_dtype": "bfloat16", "precision": sw.load_recipe("fp8-row")}):
        one, other = (
            planned(layout, mesh, model, engine=engine, **options) for layout, mesh in ((first, sizes), (second, fewer))
        )
        assert one.mesh.num_devices == other.mesh.num_devices == 8
        assert one.memory == other.memory
        assert collectives(one) == collectives(other)
        assert [row.bytes_per_device for row in one.tensors] == [row.bytes_per_device for row in other.tensors]
