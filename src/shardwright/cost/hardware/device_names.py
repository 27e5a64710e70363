"""Which chip a device is, by the name that its driver gives to JAX and to PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.cost.hardware.chips import ChipNumbers, chips

KIND_OF_DEVICE: Mapping[str, str] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300": "b300",
    "NVIDIA GB300": "gb300",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
}
"""Kinds of chips.toml. A device with another name (a PCIe card, a part of a GPU) is none of them."""


def chip_of_device(name: str) -> ChipNumbers | None:
    """The chip of a device; None for one whose numbers are not in the table.

    >>> chip_of_device("NVIDIA H100 80GB HBM3").kind, chip_of_device("cpu")
    ('h100', None)
    """
    kind = KIND_OF_DEVICE.get(name)
    return None if kind is None else chips()[kind]


def chip_called(name: str) -> ChipNumbers | None:
    """The chip by the name that plans have; None for a user's own."""
    return next((chip for chip in chips().values() if chip.name == name), None)
