"""Which chunks of a row each device has, computed by hand, and that each device then attends to as many keys as any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.core.resolution.row_order import head_and_tail


def plan_of(layout: str, *, move: str = "gather", balanced: bool = True, length: int = 64, **sizes: int) -> Plan:
    read = replace(load_layout(layout), move_attention=move)
    table = model_table("llama3-test")
    return make_plan(
        Request(layout=read, table=table, batch=8, length=length, mesh_sizes=sizes, load_balanced=balanced)
    )


def test_each_device_has_a_chunk_from_both_ends() -> None:
    assert head_and_tail(2) == (0, 3, 1, 2)
    assert head_and_tail(3) == (0, 5, 1, 4, 2, 3)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_device_attends_to_as_many_keys(devices: int) -> None:
    tokens = np.arange(12 * devices).reshape(2 * devices, -1)[list(head_and_tail(devices))]
    visible = (tokens + 1).reshape(devices, -1).sum(axis=1)
    assert len(set(visible)) == 1


def test_the_order_is_that_of_the_axes_that_shard_the_length() -> None:
    assert plan_of("cp", fsdp=2, context=4).row_chunks == (0, 7, 1, 6, 2, 5, 3, 4)
    assert plan_of("cp", fsdp=2, context=4, move="ring").row_chunks == (0, 7, 1, 6, 2, 5, 3, 4)
    assert plan_of("ep-as-cp", fsdp=2, expert=2).row_chunks == (0, 3, 1, 2)
    assert plan_of("cp", fsdp=2, context=4, balanced=False).row_chunks == (0,)


def test_where_it_has_no_effect_a_finding_reports_it() -> None:
    for plan, why in (
        (plan_of("cp", fsdp=2, context=4, move="ulysses"), "under 'ulysses'"),
        (plan_of("cp", fsdp=8, context=1), "no axis larger than 1"),
        (plan_of("fsdp", fsdp=8), "no axis larger than 1"),
    ):
        assert plan.row_chunks == (0,)
        (finding,) = [f for f in plan.findings if f.code == "SW122"]
        assert finding.severity == "info"
        assert finding.found.startswith(why)
        assert finding.fix == "Remove --load-balance."
    assert [f for f in plan_of("cp", fsdp=2, context=4).findings if f.code == "SW122"] == []


def test_tokens_divide_by_twice_the_devices_only_where_they_are_reordered() -> None:
    assert [f.code for f in plan_of("cp", context=4, length=68).errors] == ["SW108"]
    assert plan_of("cp", context=4, length=68, balanced=False).errors == ()
    assert plan_of("cp", context=4, length=68, move="ulysses").errors == ()
