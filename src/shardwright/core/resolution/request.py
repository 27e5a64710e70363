"""What is planned: a layout for a model, with numbers of devices and rows. Everything that a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Literal

from shardwright.core.engines.engines import DEFAULT_ENGINE, ENGINES, Engine
from shardwright.core.engines.properties import EngineProperties
from shardwright.core.findings.bounds import DEAREST_HOUR, is_integer, is_number, shown_number, within
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.patterns import chosen
from shardwright.core.layout.layout import Auto, Layout
from shardwright.core.layout.roles import SCHEDULES
from shardwright.core.mesh.hops import AUTO, WAYS, WholeSlice
from shardwright.core.model.optimizer import ADAMW, AVERAGE, MASTER, Kept, Optimizer
from shardwright.core.model.precision import TRAINED_IN, UNTRAINED
from shardwright.core.model.table import DTYPE_BYTES, ModelTable
from shardwright.core.policies.policy import read_policy
from shardwright.core.recipes.kernels import Device
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.stages.notation import read_stages
from shardwright.core.stages.units import UnitCost

FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of tensors that have a gradient. Training uses those of ``precision.TRAINED_IN``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a plan must know of an accelerator. ``machine``: the chips that there are, as ``h100:32x8``. ``usable_bytes``: what its compiler or driver lets a program use. ``capability``:
    the compute capability of a GPU.

    ``whole_slice``: how its compiler splits collectives over an entire slice, where all devices form one slice.
    """

    name: str
    usable_bytes: int
    source: str
    accelerator: Literal["TPU", "GPU"] = "GPU"
    capability: tuple[int, int] = (0, 0)
    whole_slice: WholeSlice | None = None
    machine: str = ""

    @property
    def device(self) -> Device:
        """What multiplies on it."""
        return Device(kind=self.accelerator, capability=self.capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The input of the planner.

    ``mesh_sizes`` replace the layout's own; one may be ``auto``, as there. ``devices`` None: the product of the sizes, or, where one is ``auto``, the
    devices of the model's natural mesh. ``batch`` rows of ``length`` tokens in a global step. ``expert_buffer``: capacity
    for the assignments sent to a device's experts, in multiples of their even share, beyond which a run stops; None: it begins with
    ``Traffic.buffer_rows(None)`` and grows.
    ``load_balanced``: devices that share a row take chunks from both of its ends (``row_order``). ``moments_dtype``: of all that the
    optimizer keeps for a weight, or one for each, in its order and with commas between. ``master_dtype``: the
    optimizer also keeps each weight in this wider dtype and updates that, and the weight is its rounding; None: it keeps none.
    ``gradients_dtype``: in which gradients are summed; None: the weights'. ``average``: how much of the
    exponential average of the weights a step leaves; None: none is kept. ``remat``: what layers keep for the backward pass, in the
    notation of ``core/policies/policy.py``. ``precision``: the recipe by which products with
    weights are quantized; None: none is. ``schedule``: that of the pipeline's stages; None: the layout's, or else the engine's own.
    ``stages``: the units of each stage (``core/stages/notation.py``); None: shared out by their work. ``unit_costs``: of every unit on the
    chips, by which they are shared out then; None: by their flops. ``hops``: the way of collectives over an entire TPU slice
    (``core/mesh/hops.py``). ``loss_chunks``: the tokens of a device's microbatch have their logits
    and their loss in this many chunks, one after the other. ``training_tokens``: of all steps of the training, for its days and, with ``device_hour_price``, its cost. ``besides``: findings about the file that the table was read from.

    Raises InputError for a count below 1, for a number above its bound (``core/findings/bounds.py``), and for an unknown
    word or pattern. Mesh sizes below 1, and mesh sizes whose product is too many devices, are findings.
    """

    layout: Layout
    table: ModelTable
    batch: int
    length: int
    mesh_sizes: Mapping[str, int | Auto] = field(default_factory=dict)
    devices: int | None = None
    engine: Engine = DEFAULT_ENGINE
    dtype: str = "float32"
    weights_dtype: str = "float32"
    moments_dtype: str = "float32"
    master_dtype: str | None = None
    gradients_dtype: str | None = None
    remat: str = "full"
    microbatches: int = 1
    loss_chunks: int = 1
    load_balanced: bool = False
    expert_buffer: float | None = None
    optimizer: Optimizer = ADAMW
    average: float | None = None
    precision: Recipe | None = None
    schedule: str | None = None
    stages: str | None = None
    unit_costs: tuple[UnitCost, ...] | None = None
    hops: str = AUTO
    chip: Chip | None = None
    training_tokens: int | None = None
    device_hour_price: float | None = None
    besides: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        counts = {"batch": "rows", "length": "tokens", "microbatches": "microbatches", "devices": "devices"}
        counts |= {"loss_chunks": "chunks"}
        for name, counted in counts.items():
            value = getattr(self, name)
            if name == "devices" and value is None:
                continue
            if not is_integer(value) or value < 1:
                raise InputError(f"{name} is {shown_number(value)}, and must be a whole number of at least 1.")
            within(name, value, counted)
        for axis, size in self.mesh_sizes.items():
            if size == "auto":
                continue
            if not is_integer(size):
                raise InputError(
                    f"the size of mesh axis '{axis}' is {shown_number(size)}, and must be a whole number or 'auto'."
                )
            within(f"the size of mesh axis '{axis}'", size, "devices")
        self._training_has_a_size()
        buffer = self.expert_buffer
        if buffer is not None and (not is_number(buffer) or not 0 < buffer < inf):
            raise InputError(f"expert_buffer is {buffer!r}, and must be a finite number above 0.")
        if self.average is not None and (not is_number(self.average) or not 0 < self.average < 1):
            raise InputError(f"average is {self.average!r}, and must be a number above 0 and below 1, as 0.999.")
        if self.precision is not None and not isinstance(self.precision, Recipe):
            raise InputError(
                f"precision is {self.precision!r}, and must be a Recipe. Give one of shardwright.load_recipe, as "
                f"load_recipe('mxfp8')."
            )
        if self.precision is not None:
            names = [weight.name for weight in self.table.weights]
            for option in ("high", "quantized"):
                chosen(names, getattr(self.precision, option), f"'{option}' of the recipe")
        if not isinstance(self.remat, str):
            raise InputError(f"remat is {self.remat!r}, and must be a text, as 'full' or 'keep=attention.output'.")
        read_policy(self.remat)
        if self.stages is not None:
            read_stages(self.stages, "stages")
        words = {
            **({} if self.schedule is None else {"schedule": (self.schedule, SCHEDULES)}),
            "engine": (self.engine, tuple(ENGINES)),
            "hops": (self.hops, (*WAYS, AUTO)),
            **{
                name: (value, TRAINED_IN)
                for name in ("dtype", "weights_dtype", "master_dtype", "gradients_dtype")
                if (value := getattr(self, name)) is not None
            },
        }
        of_moments = [("moments_dtype", (word, TRAINED_IN)) for word in self.moments_dtypes]
        for name, (word, known) in (*words.items(), *of_moments):
            if word in FLOATS and word not in known:
                raise InputError(f"{name} is {word!r}. {UNTRAINED}")
            if word not in known:
                raise InputError(f"{name} is {word!r}, and must be one of {', '.join(known)}.")
        self._dtypes_are_wide_enough()
        self._moments_have_dtypes()

    def _training_has_a_size(self) -> None:
        """Raises InputError for a number of tokens or a price that is none, and for a price of no training."""
        tokens, price = self.training_tokens, self.device_hour_price
        if tokens is not None:
            if not is_integer(tokens) or tokens < 1:
                raise InputError(f"--tokens is {shown_number(tokens)}, and must be a whole number of at least 1.")
            within("--tokens", tokens, "training tokens")
        if price is not None:
            if not is_number(price) or not 0 < price <= DEAREST_HOUR:
                raise InputError(
                    f"--price is {price if not is_number(price) else f'{price:g}'}, and must be above 0 and at most {DEAREST_HOUR:,.0f}."
                )
            if tokens is None:
                raise InputError("--price is that of a device for an hour of a training, so it needs --tokens, as 15T.")
        if tokens is not None and self.chip is None:
            raise InputError("--tokens needs --chips of a kind whose speed is known: without them a step has no time.")

    @property
    def properties(self) -> EngineProperties:
        """What its engine does otherwise than others."""
        return ENGINES[self.engine]

    @property
    def moments_dtypes(self) -> tuple[str, ...]:
        """The dtypes of what the optimizer keeps for a weight: one for all, or one for each."""
        return tuple(self.moments_dtype.split(","))

    def _moments_have_dtypes(self) -> None:
        """Raises InputError for another number of dtypes than the optimizer keeps tensors for a weight."""
        kept = [one.prefix.rstrip("/") for one in self.optimizer.kept if one.dtype is None]
        given = len(self.moments_dtypes)
        if given not in (1, len(kept)):
            raise InputError(
                f"--moments-dtype is {self.moments_dtype}: {given} dtypes, and {self.optimizer.name} keeps {len(kept)} of a weight"
                + (f", {', '.join(kept)}" if kept else "")
                + ". Give one dtype for all, or one for each."
            )

    @property
    def summed_in(self) -> str:
        """The dtype in which gradients are summed."""
        return self.gradients_dtype or self.weights_dtype

    def _dtypes_are_wide_enough(self) -> None:
        """Raises InputError for master weights no wider than the weights, and for gradients that are narrower."""
        width = DTYPE_BYTES[self.weights_dtype]
        if self.master_dtype is not None and DTYPE_BYTES[self.master_dtype] <= width:
            raise InputError(
                f"--master-dtype is {self.master_dtype}, and --weights-dtype is {self.weights_dtype}: weights are kept in a wider dtype "
                f"beside their own, or not at all. Give --weights-dtype bfloat16 and --master-dtype float32, or leave --master-dtype out."
            )
        if DTYPE_BYTES[self.summed_in] < width:
            raise InputError(
                f"--gradients-dtype is {self.summed_in}, and --weights-dtype is {self.weights_dtype}: gradients are summed in the weights' "
                f"dtype or in a wider one. Give --gradients-dtype {self.weights_dtype}, or leave it out."
            )

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What a step keeps for each trained weight in addition to it, each with its dtype: it in a wider dtype, the optimizer's, the average."""
        average = () if self.average is None else (AVERAGE,)
        return (*_kept(self.optimizer.kept, self.moments_dtypes, self.master_dtype), *average)


@lru_cache(maxsize=64)
def _kept(optimizers: tuple[Kept, ...], moments_dtypes: tuple[str, ...], master_dtype: str | None) -> tuple[Kept, ...]:
    master = () if master_dtype is None else (replace(MASTER, dtype=master_dtype),)
    own = [kept for kept in optimizers if kept.dtype is None]
    dtypes = moments_dtypes if len(moments_dtypes) == len(own) else moments_dtypes * len(own)
    of_own = {one.prefix: dtype for one, dtype in zip(own, dtypes, strict=True)}
    return (*master, *(replace(kept, dtype=of_own.get(kept.prefix, kept.dtype)) for kept in optimizers))
