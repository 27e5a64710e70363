"""A compiled program in the terms of the core: its collectives and its memory, on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.core.plan.plan import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """A collective of a compiled program, ``count_per_step`` times a step, with the trip counts of its loops.

    ``kind``: as in a plan (also ``permute``, ``send-recv``). ``axes``: the mesh axes along which the devices of a group,
    or the ends of a permute's pairs, differ, in mesh order. ``bytes_per_device``: of its operand or result on one
    device, whichever is larger, for one execution. ``component``, ``phase`` and ``tensors``: from the scopes that the
    engine writes; None or empty if the compiler kept none. ``source``: ``file:line``. ``overlapped``: whether a product
    is computed between its start and its done; None if the text does not show it. ``num_ops``: how many instructions of the
    text this row counts; an instruction with several tensors counts in a row for each.

    ``shape``: of its result on one device, or of one array if the result is split into several. ``group_size``: the
    devices that exchange with each other; None for pairs. ``operation``: its name in the source program
    (``all_gather``, ``dot_general``). ``stands_for``: the kind that the compiler replaced by it, if the text shows it:
    permutes around a ring for an all-gather, an all-reduce followed by a slice for a reduce-scatter.
    ``padding_bytes``: how many of its bytes are padding by the compiler. ``across_slices``: it sends from one slice of a
    machine to others. ``trips_known`` False: the trip count of a loop around it is unknown, and counts as 1.

    ``users``: the kinds of the instructions that use its result, through pass-through instructions and inside fusions
    (``dynamic-slice``, ``dot``). ``loop_invariant``: it moves the same in every iteration of the innermost loop.
    ``made_from_bytes``: if its operand was expanded from one smaller tensor, by a product with a weight or by
    repetition, the ``bytes_per_device`` of sending that tensor instead. ``tensor_bytes``: dtype and bytes of each
    tensor, if an instruction with several tensors has one row. ``maximum``: an all-reduce that takes the largest, not the sum.
    """

    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    count_per_step: int
    dtypes: tuple[str, ...]
    component: str | None = None
    phase: Phase | None = None
    tensors: tuple[str, ...] = ()
    source: str | None = None
    ragged: bool = False
    overlapped: bool | None = None
    in_loop: bool = False
    num_ops: int = 1
    shape: tuple[int, ...] = ()
    group_size: int | None = None
    operation: str | None = None
    stands_for: str | None = None
    padding_bytes: int = 0
    across_slices: bool = False
    trips_known: bool = True
    tensor_bytes: tuple[tuple[str, int], ...] = ()
    users: tuple[str, ...] = ()
    loop_invariant: bool = False
    made_from_bytes: int | None = None
    maximum: bool = False

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "phase": self.phase,
            "kind": self.kind,
            "axes": list(self.axes),
            "bytes_per_device": self.bytes_per_device,
            "count_per_step": self.count_per_step,
            "dtypes": list(self.dtypes),
            "tensors": list(self.tensors),
            "source": self.source,
            "overlapped": self.overlapped,
            "in_loop": self.in_loop,
            "num_ops": self.num_ops,
            "shape": list(self.shape),
            "group_size": self.group_size,
            "operation": self.operation,
            "loop_invariant": self.loop_invariant,
            **({"parts": [list(one) for one in self.tensor_bytes]} if self.tensor_bytes else {}),
            **({"users": list(self.users)} if self.users else {}),
            **({"ragged": True} if self.ragged else {}),
            **({"maximum": True} if self.maximum else {}),
            **({"stands_for": self.stands_for} if self.stands_for else {}),
            **({"padding_bytes": self.padding_bytes} if self.padding_bytes else {}),
            **({"across_slices": True} if self.across_slices else {}),
            **({} if self.trips_known else {"trips_known": False}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Bytes that collectives of a component move in a step, and those of them whose collective has no product between its start and its
    done. ``component`` None: those without a name."""

    component: str | None
    moved_bytes: int
    exposed_bytes: int

    @property
    def share(self) -> float:
        return self.exposed_bytes / self.moved_bytes

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "moved_bytes": self.moved_bytes,
            "exposed_bytes": self.exposed_bytes,
            "share": self.share,
        }


def exposures(collectives: Iterable[CompiledCollective]) -> tuple[Exposure, ...]:
    """The communication of each component that the schedule leaves exposed, those that move the most first; none where the text does not
    show it."""
    known = [one for one in collectives if one.overlapped is not None]
    found = []
    for component in dict.fromkeys(one.component for one in known):
        own = [one for one in known if one.component == component]
        moved, exposed = (
            sum(one.bytes_per_device * one.count_per_step for one in each)
            for each in (own, [one for one in own if not one.overlapped])
        )
        if moved:
            found.append(Exposure(component=component, moved_bytes=moved, exposed_bytes=exposed))
    return tuple(sorted(found, key=lambda one: -one.moved_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """A temporary of a step; for its fields see ``CompiledCollective``.

    ``bytes_per_device``: as stored, with the padding to full tiles. ``num_values``: how many such values the text has,
    which need not all be live at the same time.
    """

    bytes_per_device: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    component: str | None = None
    phase: Phase | None = None
    source: str | None = None
    operation: str | None = None
    num_values: int = 1

    def to_json(self) -> dict[str, object]:
        return {
            "bytes_per_device": self.bytes_per_device,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "op": self.op,
            "component": self.component,
            "phase": self.phase,
            "source": self.source,
            "operation": self.operation,
            "num_values": self.num_values,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProduct:
    """``num_ops`` instructions that multiply with a weight; ``dtypes``: of both operands. Other fields as in ``CompiledCollective``."""

    component: str | None
    phase: Phase | None
    tensors: tuple[str, ...]
    dtypes: tuple[str, ...]
    source: str | None = None
    num_ops: int = 1

    def times(self, number: int) -> CompiledProduct:
        return replace(self, num_ops=number)

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "phase": self.phase,
            "tensors": list(self.tensors),
            "dtypes": list(self.dtypes),
            "source": self.source,
            "num_ops": self.num_ops,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes of a program on one device as its compiler reports them, and its largest temporaries from the text.

    ``peak_bytes``: the compiler's figure; if it has none, arguments, output and temporaries less the bytes that output
    and arguments share. ``host_bytes``: activations in the host's memory. ``plan_bytes``: the memory under the names of a plan, if the program distinguishes them.
    """

    arguments_bytes: int
    temporaries_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    largest: tuple[Temporary, ...] = ()
    plan_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "arguments_bytes": self.arguments_bytes,
            "temporaries_bytes": self.temporaries_bytes,
            "output_bytes": self.output_bytes,
            "aliased_bytes": self.aliased_bytes,
            "peak_bytes": self.peak_bytes,
            **({"host_bytes": self.host_bytes} if self.host_bytes else {}),
            "largest": [temporary.to_json() for temporary in self.largest],
            **self.plan_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A compiler package, its version, and the version that JAX requires (``0.0.42.*``)."""

    name: str
    version: str
    wanted: str

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "version": self.version, "wanted": self.wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peak memory of a device of one rank of a pipeline, and what the plan has for it. ``units``: of each of its stages.
    ``planned_even_bytes``: as of a program."""

    rank: int
    units: tuple[str, ...]
    peak_bytes: int
    planned_bytes: int
    planned_even_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "units": list(self.units),
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.planned_bytes,
            **({} if self.planned_even_bytes is None else {"planned_even_bytes": self.planned_even_bytes}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """``target``: as requested (``v5p:4x4x4``). ``flops_per_device``: of the matrix products in the text, with the trip
    counts of loops; None if a trip count is unknown. ``component_flops``: the same by component, of the products with a
    name. ``products``: those with a weight whose operands a recipe quantizes. ``notes``: log lines of the compiler about tensors that it replicated involuntarily (full
    rematerialization); for PyTorch, the assumptions of the dry run. ``tools``: see
    ``compiled/reading/tool_chain.py``. ``options``: of the compiler, those that were given. ``ranks``: of a pipeline whose ranks have programs of their own, on PyTorch.
    ``planned_even_bytes``: what the plan has where every expert gets the same number of rows, for a program that assumes this; None where
    it has no more for the worst case."""

    target: str
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    compile_seconds: float
    flops_per_device: int | None = None
    component_flops: Mapping[str, int] = field(default_factory=dict)
    products: tuple[CompiledProduct, ...] = ()
    notes: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[RankMemory, ...] = ()
    planned_even_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "collectives": [collective.to_json() for collective in self.collectives],
            "memory": self.memory.to_json(),
            "compile_seconds": self.compile_seconds,
            "flops_per_device": self.flops_per_device,
            "component_flops": dict(self.component_flops),
            **({"products": [product.to_json() for product in self.products]} if self.products else {}),
            "said": list(self.notes),
            "tools": [tool.to_json() for tool in self.tools],
            **({"options": dict(self.options)} if self.options else {}),
            **({"exposed": [one.to_json() for one in exposed]} if (exposed := exposures(self.collectives)) else {}),
            **({} if self.planned_even_bytes is None else {"planned_even_bytes": self.planned_even_bytes}),
            **({"ranks_memory": [one.to_json() for one in self.ranks]} if self.ranks else {}),
        }
