"""The table of chips: every number has a source and a date, and the memory limits are the compiler's or the driver's."""

from __future__ import annotations

import math
import re

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.cost.hardware.chips import GIB, Number, chip_of, chips

UNITS = (
    "_bytes",
    "_gib",
    "_per_s",
    "_s",
    "_devices",
    "_chips",
    "_dims",
    "_per_chip",
    "_share_of_bf16",
    "_capability",
    "_share",
    "_side",
    "_at_once",
    "multiprocessors",
)
COMMON = {"devices_per_chip", "bf16_flops_per_s", "float32_share_of_bf16", "hbm_bytes_per_s"}
OF_NETWORK = {
    "torus": {
        "torus_dims",
        "pod_chips",
        "longest_dim_chips",
        "wraps_at_multiples_of_chips",
        "matrix_unit_side",
        "link_bytes_per_s",
        "hop_latency_s",
    },
    "switch": {
        "compute_capability",
        "domain_devices",
        "scale_up_bytes_per_s",
        "base_latency_s",
        "ring_step_latency_s",
        "ring_out_step_latency_s",
    },
}


MEASURED = {
    "product_bf16_flops_per_s",
    "attention_forward_flops_per_s",
    "attention_backward_flops_per_s",
    "copy_bytes_per_s",
    "kernels_share",
    "estimate_error_share",
}
"""What measured.toml has of every chip."""
OF_SOME_GPUS = {
    "fp8_flops_per_s",
    "fp4_flops_per_s",
    "fp32_flops_per_s",
    "product_fp8_flops_per_s",
    "product_fp4_flops_per_s",
    "torch_attention_forward_flops_per_s",
    "torch_attention_backward_flops_per_s",
    "multiprocessors",
    "switch_gather_share",
    "linked_devices",
    "hidden_cost_share",
}


def cited(number: Number):
    return (number.used, *number.others)


@pytest.mark.parametrize("kind", chips())
def test_every_number_has_a_unit_a_source_and_a_date(kind):
    for name, number in chip_of(kind).numbers.items():
        assert name.endswith(UNITS), name
        for one in cited(number):
            assert one.value > 0
            assert math.isfinite(one.value)
            assert len(one.source) > 5, name
            assert re.fullmatch(r"2026(-\d\d(-\d\d)?)?", one.date), name
        assert number.read("slowest") <= number.read("used") <= number.read("fastest")


@pytest.mark.parametrize("kind", chips())
def test_every_chip_has_the_numbers_of_its_network_and_one_limit(kind):
    chip = chip_of(kind)
    limits = {"usable_bytes", "usable_gib"} & set(chip.numbers)
    assert len(limits) == 1
    rest = set(chip.numbers) - limits - {"scale_out_bytes_per_s", "host_bytes_per_s"}
    if chip.network == "torus":
        rest -= {"whole_slice_gather_devices", "whole_slice_scatter_devices", "collectives_at_once"}
    else:
        rest -= OF_SOME_GPUS
    assert rest == COMMON | MEASURED | OF_NETWORK[chip.network]


@pytest.mark.parametrize("kind", chips())
def test_kernels_reach_less_than_the_full_rates_and_a_step_less_than_its_kernels(kind):
    chip = chip_of(kind)
    for name in ("bf16_flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s"):
        assert (name in chip.numbers) == (f"product_{name}" in chip.numbers)
        if name in chip.numbers:
            assert chip.read(f"product_{name}") < chip.read(name)
    assert chip.read("copy_bytes_per_s") < chip.read("hbm_bytes_per_s")
    assert chip.read("attention_backward_flops_per_s") < chip.read("attention_forward_flops_per_s")
    assert chip.read("attention_forward_flops_per_s") < chip.read("product_bf16_flops_per_s")
    assert chip.kernels_share() < 1


def test_latencies_are_not_in_conflict():
    # read() takes the largest of conflicting numbers as the fastest, which would be wrong for a latency.
    for chip in chips().values():
        assert not any(number.others for name, number in chip.numbers.items() if name.endswith("latency_s"))


def test_usable_bytes_are_those_of_the_compiler_or_the_driver():
    assert chip_of("v5p").chip.usable_bytes == int(95.74 * GIB)
    assert chip_of("tpu7x").chip.usable_bytes == int(94.75 * GIB)
    assert chip_of("h100").chip.usable_bytes == 84_942_979_072
    assert chip_of("h200").chip.source == "OpenXLA's target specification: what the driver reports 2026"


def test_conflicts_are_kept():
    def values(kind: str, name: str) -> set[float]:
        return {one.value for one in cited(chip_of(kind).numbers[name])}

    assert values("v5e", "link_bytes_per_s") == {45e9, 50e9}
    assert values("v5p", "link_bytes_per_s") == values("v6e", "link_bytes_per_s") == {90e9, 100e9}
    assert values("v5e", "hbm_bytes_per_s") == {819e9, 859e9}
    assert values("b200", "hbm_bytes_per_s") == {7.672e12, 8.0e12}
    assert values("b200", "bf16_flops_per_s") == {2225e12, 2250e12}
    assert values("h100", "scale_up_bytes_per_s") == {370e9, 450e9}


def test_what_no_source_was_checked_for_is_not_there():
    with pytest.raises(KeyError):
        chip_of("mi325x").read("scale_out_bytes_per_s")


def test_an_unknown_chip():
    with pytest.raises(InputError, match=r"^--chips: no chip is called 'hh100'\. Did you mean 'h100'\?$"):
        chip_of("hh100")
    with pytest.raises(InputError, match=r"^--chips: no chip is called 'h10'\. Known: cpu, .*, h100, .*, h200, .*\.$"):
        chip_of("h10")
