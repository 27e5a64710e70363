"""``--chips KIND:SHAPE``: the number of devices, and the texts that are refused."""

from __future__ import annotations

import re

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.cost import read_machine
from shardwright.cost.hardware.written import kind_and_shape

FORM = (
    "Expected: KIND:SHAPE, as in v5p:4x4x4, v5p:4x4x4*2 for two slices, h100:8x8, h100:64 or cpu:8. "
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


@pytest.mark.parametrize(
    ("cores", "shape"),
    [(8, "2x2x1"), (16, "2x2x2"), (64, "2x4x4"), (128, "4x4x4"), (256, "4x4x8"), (512, "4x8x8"), (1024, "8x8x8"), (2048, "8x8x16"),
     (4096, "8x16x16"), (8192, "16x16x16"), (12288, "16x16x24")],
)  # fmt: skip
def test_names_of_cloud_tpu_have_their_shapes(cores: int, shape: str) -> None:
    """The table of docs.cloud.google.com/tpu/docs/v5p."""
    assert kind_and_shape(f"v5p-{cores}") == f"v5p:{shape}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p-7", "counts TensorCores, of which a chip of v5p has 2"),
        ("v5p-48", "is 24 chips of v5p, and no slice has so many"),
        ("h100:12", "is 12 GPUs, and a node of H100 SXM has 8: 1 node and 4 more. Give nodes and GPUs, as h100:1x8"),
    ],
)
def test_a_number_without_a_shape(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        kind_and_shape(text)


def test_a_machine_is_shown_as_it_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "llama3-8b", "--layout", "fsdp", "--mesh", "fsdp=64", "--batch", "64", "--chips", "V5P-128"])
    assert " = 64 devices, TPU v5p (v5p:4x4x4)\n" in capsys.readouterr().out
