"""What is planned: a layout for a model, on so many devices, with so many rows. Everything a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.core.layout import Engine, Layout
from shardwright.core.table import ModelTable

REMAT_POLICIES = ("full", "dots", "none")
"""What the backward pass recomputes: all of a layer, all but its matrix products, nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a plan must know of an accelerator. ``usable_bytes``: what its compiler or driver lets a program have."""

    name: str
    usable_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question to the planner.

    ``mesh_sizes`` stand in for the layout's own. ``devices`` None: what the sizes multiply to, or, where one
    is ``auto``, the devices of the model's natural mesh. ``batch`` rows of ``length`` tokens in a global step.
    """

    layout: Layout
    table: ModelTable
    batch: int
    length: int
    mesh_sizes: Mapping[str, int] = field(default_factory=dict)
    devices: int | None = None
    engine: Engine = "jax"
    dtype: str = "float32"
    weights_dtype: str = "float32"
    moments_dtype: str = "float32"
    remat: str = "full"
    micro_steps: int = 1
    load_balanced: bool = False
    chip: Chip | None = None
