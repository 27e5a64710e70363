"""What is planned: a layout for a model, on so many devices, with so many rows. Everything a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from shardwright.core.findings.bounds import is_integer, is_number, shown_number, within
from shardwright.core.findings.errors import InputError
from shardwright.core.layout.layout import Engine, Layout
from shardwright.core.mesh.hops import WholeSlice
from shardwright.core.model.precision import TRAINED_IN, UNTRAINED
from shardwright.core.model.table import ModelTable

REMAT_POLICIES = ("full", "dots", "none")
"""What the backward pass recomputes: all of a layer, all but its matrix products, nothing."""


FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of numbers that have a gradient. What is trained is in those of ``precision.TRAINED_IN``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a plan must know of an accelerator. ``usable_bytes``: what its compiler or driver lets a program have.

    ``whole_slice``: how its compiler's collectives over a whole slice go, where all devices are one.
    """

    name: str
    usable_bytes: int
    source: str
    accelerator: Literal["TPU", "GPU"] = "GPU"
    whole_slice: WholeSlice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question to the planner.

    ``mesh_sizes`` stand in for the layout's own. ``devices`` None: what the sizes multiply to, or, where one
    is ``auto``, the devices of the model's natural mesh. ``batch`` rows of ``length`` tokens in a global step.
    ``expert_buffer``: room for the tokens that come to a device's experts, in even shares; None: for all that may come.
    ``load_balanced``: devices that share a row take pieces from both of its ends (``row_order``).

    Raises InputError for a count below 1, for a number above its bound (``core/findings/bounds.py``), and for a word that is none
    of those known. Sizes below 1 are findings, and sizes that together are too many devices.
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
    microbatches: int = 1
    load_balanced: bool = False
    expert_buffer: float | None = None
    chip: Chip | None = None

    def __post_init__(self) -> None:
        counts = {"batch": "rows", "length": "tokens", "microbatches": "microbatches", "devices": "devices"}
        for name, counted in counts.items():
            value = getattr(self, name)
            if name == "devices" and value is None:
                continue
            if not is_integer(value) or value < 1:
                raise InputError(f"{name} is {shown_number(value)}, and must be a whole number of at least 1.")
            within(name, value, counted)
        for axis, size in self.mesh_sizes.items():
            if not is_integer(size):
                raise InputError(f"the size of mesh axis '{axis}' is {shown_number(size)}, and must be a whole number.")
            within(f"the size of mesh axis '{axis}'", size, "devices")
        room = self.expert_buffer
        if room is not None and (not is_number(room) or not 0 < room < inf):
            raise InputError(f"expert_buffer is {room!r}, and must be a finite number above 0.")
        words = {
            "engine": (self.engine, get_args(Engine)),
            "remat": (self.remat, REMAT_POLICIES),
            **{name: (getattr(self, name), TRAINED_IN) for name in ("dtype", "weights_dtype", "moments_dtype")},
        }
        for name, (word, known) in words.items():
            if word in FLOATS and word not in known:
                raise InputError(f"{name} is {word!r}. {UNTRAINED}")
            if word not in known:
                raise InputError(f"{name} is {word!r}, and must be one of {', '.join(known)}.")
