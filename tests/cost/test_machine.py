"""``--chips KIND:SHAPE``: the number of devices, and the texts that are refused."""

from __future__ import annotations

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.cost import read_machine

FORM = (
    "Expected: KIND:SHAPE, as in v5p:4x4x4, v5p:4x4x4*2 for two slices, h100:8x8 or cpu:8. "
    "A file of your own numbers follows as +FILE."
)


@pytest.mark.parametrize(
    ("text", "num_devices"),
    [
        ("v5p:4x4x4", 64),
        ("v5p:4x4x4*2", 128),
        ("v6e:16x16", 256),
        ("tpu7x:2x2x1", 8),
        ("tpu7x:2x2x1*3", 24),
        ("h100:8x8", 64),
        ("h200:1", 1),
        ("gb200:2x72", 144),
        ("cpu:8", 8),
    ],
)
def test_devices_of_a_shape(text, num_devices):
    machine = read_machine(text)
    assert machine.num_devices == num_devices
    assert (machine.chip is None) == text.startswith("cpu")


@pytest.mark.parametrize(
    "text", ["h100", "h100:", "h100:8x", "h100:0", "h100:8*", "h100:a", ":8x", "8x8", "v5p:4x4x4*0", "cpu"]
)
def test_a_text_that_is_not_a_shape(text):
    with pytest.raises(InputError) as refused:
        read_machine(text)
    assert str(refused.value) == f"--chips: '{text}' does not give a kind of chip and a shape. {FORM}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5x:4x4", "--chips: no chip is called 'v5x'. Did you mean 'v5p'?"),
        (
            "v5e:4x4x4",
            "--chips: 'v5e:4x4x4' has 3 dims, and a slice of TPU v5e is a torus of 2. Expected: v5e:XxY, as in v5e:4x4.",
        ),
        (
            "v5p:8",
            "--chips: 'v5p:8' has 1 dim, and a slice of TPU v5p is a torus of 3. Expected: v5p:XxYxZ, as in v5p:4x4x4.",
        ),
        (
            "v5e:32x4",
            "--chips: 'v5e:32x4' is larger than a slice of TPU v5e can be: 16 chips along a dim and 256 in total. "
            "Two slices are written as v5e:4x4*2.",
        ),
        (
            "h100:2x16",
            "--chips: 'h100:2x16' has 16 GPUs in a node, and H100 SXM has 8 at most. "
            "Expected: h100:NODESxGPUS, as in h100:2x8, or h100:8 for one node.",
        ),
        (
            "h100:2x2x2",
            "--chips: 'h100:2x2x2' is not a shape of H100 SXM. "
            "Expected: h100:NODESxGPUS, as in h100:2x8, or h100:8 for one node.",
        ),
        (
            "b200:2x8*2",
            "--chips: 'b200:2x8*2' is not a shape of B200. "
            "Expected: b200:NODESxGPUS, as in b200:2x8, or b200:8 for one node.",
        ),
        *(
            (
                text,
                f"--chips: the number of devices of '{text}' is {number}, and must be at most 1,048,576. "
                "Give fewer devices.",
            )
            for text, number in (
                ("cpu:1048577", "1,048,577"),
                ("h100:131073x8", "1,048,584"),
                ("v5e:16x16*4097", "1,048,832"),
            )
        ),
    ],
)
def test_a_shape_that_a_chip_does_not_have(text, message):
    with pytest.raises(InputError) as refused:
        read_machine(text)
    assert str(refused.value) == message
