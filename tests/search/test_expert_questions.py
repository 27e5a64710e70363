"""Questions about layouts whose answers experts agree on: the prices that a search orders layouts by give the same answers.

Each question prices the few layouts that decide it, as the search would.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.findings.effect import Price
from shardwright.cost.advice import priced_request
from shardwright.models import build
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of
from shardwright.search.space.settings import Setting
from shardwright.search.space.space import forms_of

FULL = Setting(remat="full")


def stages(microbatches: int) -> Setting:
    """A circular pipeline, whose weights are gathered once a step."""
    return Setting(remat="full", microbatches=microbatches, schedule="circular", once=True)


def price_of(
    model: str, mesh: str, options: PlanOptions, setting: Setting = FULL, form: str = "dense"
) -> tuple[Price, bool]:
    """The price of a mesh of a form, and whether it fits."""
    typed = typed_request(model, "fsdp", options)
    assert typed.machine is not None
    assert typed.request.chip is not None
    sizes = {axis: int(size) for axis, size in (entry.split("=") for entry in mesh.split(","))}
    arrangement = Arrangement(layout=layout_of(form_named(form), tuple(sizes)), sizes=sizes, form=form)
    price = priced_request(setting.of(arrangement, typed.request, typed.request.precision), typed.machine)
    return price, price.bytes_per_device <= typed.request.chip.usable_bytes


def seconds(model: str, mesh: str, options: PlanOptions, setting: Setting = FULL, form: str = "dense") -> float:
    price, _ = price_of(model, mesh, options, setting, form)
    assert price.seconds is not None
    return price.seconds


def on(chips: str, batch: int, length: int = 4096, **options: object) -> PlanOptions:
    return replace(PlanOptions(chips=chips, batch=batch, length=length), **options)  # pyright: ignore[reportArgumentType]


def test_tensor_parallelism_stays_within_a_node() -> None:
    options = on("h100:8x4", 64, 8192)
    assert seconds("llama3-70b", "fsdp=8,tensor=4", options) < seconds("llama3-70b", "fsdp=4,tensor=8", options)


def test_8b_on_8_chips_has_no_tensor_parallelism() -> None:
    options, setting = on("h100:8", 64, 8192), replace(FULL, microbatches=4)
    alone, *others = (
        seconds("llama3-8b", mesh, options, setting)
        for mesh in ("fsdp=8", "fsdp=4,tensor=2", "fsdp=2,tensor=4", "tensor=8")
    )
    assert alone < others[0] < others[1] < others[2]


@pytest.mark.parametrize("mesh", ["fsdp=64,tensor=2", "fsdp=16,tensor=8"])
def test_70b_on_128_v5p_has_no_tensor_parallelism_either(mesh: str) -> None:
    options = on("v5p:4x4x8", 128)
    assert seconds("llama3-70b", "fsdp=128", options) < seconds("llama3-70b", mesh, options)


@pytest.mark.parametrize("mesh", ["fsdp=4,context=2", "context=8"])
def test_short_rows_are_not_sharded(mesh: str) -> None:
    options, setting = on("h100:8", 64), replace(FULL, microbatches=2)
    assert seconds("llama3-8b", "fsdp=8", options, setting) < seconds("llama3-8b", mesh, options, setting)


def test_rows_of_256k_tokens_are_sharded_since_one_of_them_fits_on_no_device() -> None:
    options = on("h100:8", 8, 262_144, load_balance=True)
    _, whole_rows_fit = price_of("llama3-8b", "fsdp=8", options, replace(FULL, loss_chunks=8))
    _, eighths_fit = price_of("llama3-8b", "context=8", options, replace(FULL, loss_chunks=8, microbatches=8))
    assert (whole_rows_fit, eighths_fit) == (False, True)


def test_a_small_model_over_many_nodes_has_replicas_of_a_node() -> None:
    options, setting = on("h100:32x8", 256, 2048), replace(FULL, shared_update=True)
    hybrid, sharded, replicas = (
        seconds("llama3-1b", mesh, options, setting) for mesh in ("data=32,fsdp=8", "fsdp=256", "data=256")
    )
    assert hybrid < replicas < sharded


def test_experts_on_devices_gain_over_gathered_ones_the_most_with_few_rows() -> None:
    few, many = (
        seconds("mixtral-8x22b", "fsdp=16,expert=8", on("h100:16x8", rows), form="ep")
        / seconds("mixtral-8x22b", "fsdp=128", on("h100:16x8", rows))
        for rows in (128, 1024)
    )
    assert few < 0.9 < many


def test_671b_on_nodes_of_8_has_its_experts_in_a_node_and_stages_over_nodes() -> None:
    options = on("b200:32x8", 2048)
    within = seconds("deepseek3-671b", "stage=16,fsdp=2,expert=8", options, stages(64), "ep")
    over_nodes = seconds("deepseek3-671b", "stage=4,expert=64", options, stages(32), "ep")
    no_stages = seconds("deepseek3-671b", "fsdp=32,expert=8", options, replace(FULL, microbatches=4), "ep")
    assert within < over_nodes < no_stages


def test_64_devices_of_experts_cost_much_over_nodes_of_8_and_little_in_a_domain_of_64() -> None:
    over_nodes, within = (
        seconds("deepseek3-671b", "stage=4,expert=64", on(chips, 2048), stages(32), "ep")
        / seconds("deepseek3-671b", "stage=16,fsdp=2,expert=8", on(chips, 2048), stages(64), "ep")
        for chips in ("b200:32x8", "gb200:4x64")
    )
    assert within < 1.2 < 2 < over_nodes


def test_stages_cross_slow_links_in_place_of_gathers_where_rows_are_few() -> None:
    options = on("h100:16x1", 32, 2048)
    assert seconds("llama3-8b", "stage=4,fsdp=4", options, stages(8)) < seconds("llama3-8b", "fsdp=16", options) / 1.5


def test_with_fewer_rows_than_devices_405b_has_stages_beside_tensor_parallelism() -> None:
    options = on("h100:128x8", 128, 8192)
    both = seconds("llama3-405b", "stage=8,fsdp=16,tensor=8", options, stages(8))
    tensor = seconds("llama3-405b", "fsdp=128,tensor=8", options)
    context = seconds("llama3-405b", "fsdp=128,context=8", options)
    assert both < tensor < context


def test_70b_on_a_domain_of_64_has_fsdp_alone() -> None:
    options = replace(
        on("gb200:64", 256, 8192, weights_dtype="bfloat16", master_dtype="float32", gradients_dtype="float32"),
        precision="fp8-current",
    )
    setting = replace(FULL, microbatches=2)
    alone = seconds("llama3-70b", "fsdp=64", options, setting)
    others = (
        seconds("llama3-70b", "fsdp=32,tensor=2", options, setting),
        seconds("llama3-70b", "stage=4,fsdp=16", options, stages(16)),
        seconds("llama3-70b", "stage=4,fsdp=8,tensor=2", options, stages(16)),
    )
    assert alone < min(others) * 1.1


def test_what_fits_is_kept() -> None:
    kept, dots, full = (
        price_of("llama3-8b", "fsdp=8", on("h100:8", 8), Setting(remat=policy)) for policy in ("none", "dots", "full")
    )
    assert all(fits for _, fits in (kept, dots, full))
    assert (kept[0].seconds or 0) < (dots[0].seconds or 0) < (full[0].seconds or 0)


def test_fsdp_has_few_microbatches_and_stages_many() -> None:
    options = on("h100:32x8", 1024, 8192)
    gathers = [seconds("llama3-70b", "fsdp=256", options, replace(FULL, microbatches=num)) for num in (1, 2, 4)]
    assert gathers == sorted(gathers)
    pipelines = [seconds("llama3-70b", "stage=4,fsdp=64", options, stages(num)) for num in (8, 4)]
    assert pipelines == sorted(pipelines)


def test_the_same_devices_are_slower_in_smaller_nodes() -> None:
    times = [seconds("llama3-8b", "fsdp=64", on(chips, 64)) for chips in ("h100:8x8", "h100:16x4", "h100:64x1")]
    assert times == sorted(times)
    assert times[0] < times[-1] / 2


@pytest.mark.parametrize(("rows", "length"), [(64, 4096), (64, 8192), (128, 2048)])
def test_64_b200_are_faster_than_64_h100(rows: int, length: int) -> None:
    older, newer = (seconds("llama3-8b", "fsdp=64", on(chips, rows, length)) for chips in ("h100:8x8", "b200:8x8"))
    assert newer < 0.85 * older


def test_a_model_without_experts_has_no_axis_for_them() -> None:
    assert [form.name for form in forms_of(build("llama3-70b"))] == ["dense"]
    assert len(forms_of(build("mixtral-8x7b"))) > 1
