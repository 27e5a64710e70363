"""Chips by name, and what is refused."""

from __future__ import annotations

import tomllib

import pytest

from shardwright.core.errors import InputError
from shardwright.cost.chips import GIB, TABLE, read_chips

FORM = "Expected: KIND:SHAPE, as in v5p:4x4x4, v5p:4x4x4*2 for two slices, h100:8x8 or cpu:8."


@pytest.mark.parametrize(
    ("text", "num_devices"),
    [("v5p:4x4x4", 64), ("v5p:4x4x4*2", 128), ("v6e:16x16", 256), ("tpu7x:2x2x1", 8), ("h100:8x8", 64), ("h200:1", 1)],
)
def test_devices_of_a_shape(text, num_devices):
    chip, number = read_chips(text)
    assert chip is not None
    assert number == num_devices


def test_cpu_has_devices_and_no_limit():
    assert read_chips("cpu:8") == (None, 8)


def test_bytes_are_the_limit_of_one_device():
    chip, _ = read_chips("v5p:2x2x1")
    assert chip is not None
    assert chip.usable_bytes == int(95.74 * GIB)
    chip, _ = read_chips("h100:8")
    assert chip is not None
    assert chip.usable_bytes == 84_942_979_072


def test_every_number_has_a_source_with_a_date():
    for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["chip"]:
        assert "2026" in row["source"], row
        assert len({"usable_bytes", "usable_gib"} & set(row)) == 1, row


@pytest.mark.parametrize(
    "text", ["h100", "h100:", "h100:8x", "h100:0", "h100:8*", "h100:a", ":8", "8x8", "v5p:4x4x4*0"]
)
def test_what_is_no_shape(text):
    with pytest.raises(InputError) as refused:
        read_chips(text)
    kind = text.partition(":")[0]
    if text == ":8":
        assert str(refused.value).startswith("--chips: no chip is called ''. ")
    else:
        assert str(refused.value) == f"--chips: '{text}' does not say which chips and how many. {FORM}", kind


def test_an_unknown_chip():
    with pytest.raises(InputError, match=r"^--chips: no chip is called 'h10'\. Did you mean 'h100'\?$"):
        read_chips("h10:8")
