"""What follows from measurements: chips whose numbers are known are measured by the formulas, and found again."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.cost import price, read_machine
from shardwright.cost.calibration import (
    Measured,
    ShortRun,
    attention_flops,
    collective_size,
    file_text,
    fitted,
    machine_without_numbers,
    wanted,
)
from shardwright.cost.hardware.chips import Cited, Number, chip_of
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.models import build
from tests.cost.plans import request

TRUE = {
    "product_bf16_flops_per_s": 3e10,
    "bf16_flops_per_s": 3e10,
    "attention_forward_flops_per_s": 2e10,
    "attention_backward_flops_per_s": 1.5e10,
    "copy_bytes_per_s": 5e9,
    "hbm_bytes_per_s": 5e9,
    "scale_up_bytes_per_s": 2e9,
    "base_latency_s": 2e-4,
    "kernels_share": 0.6,
    "step_latency_s": 3e-3,
}


def with_layers(layers: int) -> Plan:
    short = build("llama3-test", {"num_layers": str(layers)})
    return make_plan(replace(request("llama3-test", "fsdp", devices=8, batch=8), table=short))


def true_machine() -> Machine:
    unknown = machine_without_numbers(8, 1e11)
    assert unknown.numbers is not None
    cited = {name: Number(used=Cited(value=value, source="true", date="-")) for name, value in TRUE.items()}
    return replace(unknown, numbers=replace(unknown.numbers, numbers={**unknown.numbers.numbers, **cited}))


def measured_on(machine: Machine, plan: Plan) -> list[Measured]:
    """What exact measurements on a machine would find."""
    chip = machine.numbers
    assert chip is not None
    sizes = wanted(plan)
    assert sizes.attention is not None
    rows = [
        *(("product", str(s), 2 * s.m * s.k * s.n, TRUE["product_bf16_flops_per_s"]) for s in sizes.products),
        ("attention forward", "all", attention_flops(sizes.attention), TRUE["attention_forward_flops_per_s"]),
        ("attention backward", "all", 3.5 * attention_flops(sizes.attention), TRUE["attention_backward_flops_per_s"]),
        ("copy", "all", 8.0 * sizes.copied, TRUE["copy_bytes_per_s"]),
    ]
    found = [
        Measured(what=what, size=size, amount=amount, seconds=(amount / rate,)) for what, size, amount, rate in rows
    ]
    mapping, rates = map_mesh(plan.mesh, machine), Rates.of(chip, "used")
    for one in sizes.collectives:
        time = time_of(one.kind, one.bytes_per_device, mapping.group(one.axes), rates)
        assert time is not None
        found.append(Measured(what=one.kind, size=collective_size(one), amount=1, seconds=(time.seconds,)))
    return found


def test_numbers_that_made_the_measurements_are_found_again(tmp_path: Path):
    plan, true, unknown = with_layers(6), true_machine(), machine_without_numbers(8, 1e11)
    steps = {layers: price(with_layers(layers), true).step for layers in (1, 3, 6)}
    runs = []
    for layers in (1, 3):
        step = steps[layers]
        assert step is not None
        runs.append(ShortRun(plan=with_layers(layers), layers=layers, seconds=(step.seconds,) * 5))
    found = measured_on(true, plan)
    chip = fitted(plan, unknown, found, runs, "2026-11-23")
    for name, value in TRUE.items():
        assert chip.read(name) == pytest.approx(value, rel=1e-3), name
    # What the file says is what --chips reads, and a step that was not measured is estimated from those that were.
    path = tmp_path / "mine.toml"
    path.write_text(file_text(chip, ["made by a test"], found, runs), encoding="utf-8")
    assert len(tomllib.loads(path.read_text(encoding="utf-8"))["measured"]) == len(found) + 2
    machine = read_machine(f"cpu:8+{path}")
    assert machine.chip is None
    after, expected = price(plan, machine).step, steps[6]
    assert after is not None
    assert expected is not None
    assert after.seconds == pytest.approx(expected.seconds, rel=1e-3)
    assert after.low_seconds == pytest.approx(after.seconds / 1.05)


def test_a_chip_of_the_table_keeps_its_data_sheet_and_gets_what_was_measured(tmp_path: Path):
    plan = make_plan(request("llama3-test", "fsdp", devices=8, batch=8, dtype="bfloat16"))
    machine = read_machine("h100:8")
    found = [
        Measured(what="product", size="a", amount=6e14, seconds=(1.0, 1.2, 1.0, 1.0)),
        Measured(what="copy", size="b", amount=2.5e12, seconds=(1.0,)),
    ]
    chip = fitted(plan, machine, found, [], "2026-11-23")
    assert (chip.read("product_bf16_flops_per_s"), chip.read("copy_bytes_per_s")) == (6e14, 2.5e12)
    assert (chip.read("bf16_flops_per_s"), chip.kernels_share()) == (989e12, chip_of("h100").kernels_share())
    path = tmp_path / "mine.toml"
    path.write_text(file_text(chip, [], found, []), encoding="utf-8")
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    assert set(written["numbers"]) == {"product_bf16_flops_per_s", "copy_bytes_per_s"}
    assert read_machine(f"h100:8+{path}").numbers == chip


def test_a_few_slow_repetitions_do_not_count():
    noisy = Measured(what="copy", size="", amount=1, seconds=(1.0, 1.02, 9.0, 1.01, 4.0, 1.0, 1.03, 1.0))
    assert noisy.typical == 1.0
    assert noisy.spread == pytest.approx(0.03)
