"""A compiled program in the core's words: what it moves, and the memory that it takes, on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.core.plan.plan import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """A collective of a compiled program, ``count_per_step`` times a step, loops multiplied out.

    ``kind``: as in a plan (``permute``, ``send-recv`` too). ``axes``: the mesh axes along which the devices of a group,
    or the ends of a permutation's pairs, differ; mesh order. ``bytes_per_device``: of its operand or result on one
    device, whichever is larger, for one execution. ``component``, ``phase`` and ``tensors``: from the scopes that the
    engine writes; None and empty where the compiler kept none. ``source``: ``file:line``. ``overlapped``: whether the
    compiler begins it early and waits for it later; None where it does not say. ``num_ops``: the instructions of the
    text that this row stands for; one that moves several tensors has a part in a row for each.

    ``shape``: of its result on one device, or of one part where it comes in parts. ``group_size``: the devices that
    exchange with each other; None for pairs. ``operation``: what it was in the program that was compiled
    (``all_gather``, ``dot_general``). ``stands_for``: the kind that the compiler made it of, where the text shows it:
    permutes around a ring for an all-gather, a sum of which each device keeps a part for a reduce-scatter.
    ``padding_bytes``: how many of its bytes are there only because the compiler made shapes even. ``across_slices``: it
    crosses from one slice of a machine to others. ``trips_known`` False: a loop around it does not say how often it
    runs, and counts once.

    ``users``: the compiler's names of what its result goes into, through what only hands it on and inside fusions
    (``dynamic-slice``, ``dot``). ``loop_invariant``: the innermost loop around it moves the same in every turn.
    ``made_from_bytes``: where one smaller tensor is made into what travels, by a product with a weight or by
    repetition, ``bytes_per_device`` if that one travelled. ``parts``: what an instruction moves that has several
    tensors, where they have one row.
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
    parts: tuple[tuple[str, int], ...] = ()
    users: tuple[str, ...] = ()
    loop_invariant: bool = False
    made_from_bytes: int | None = None

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
            **({"parts": [list(part) for part in self.parts]} if self.parts else {}),
            **({"users": list(self.users)} if self.users else {}),
            **({"ragged": True} if self.ragged else {}),
            **({"stands_for": self.stands_for} if self.stands_for else {}),
            **({"padding_bytes": self.padding_bytes} if self.padding_bytes else {}),
            **({"across_slices": True} if self.across_slices else {}),
            **({} if self.trips_known else {"trips_known": False}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """A value that a step needs for a while, and what it is: see ``CompiledCollective``.

    ``bytes_per_device``: as it lies in memory, with the rest of tiles that it does not fill. ``num_values``: how many
    such values the text has, which need not all be there at one time.
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
class CompiledMemory:
    """Bytes of a program on one device, as its compiler gives them, and its largest temporaries as the text shows them.

    ``peak_bytes``: arguments, output and temporaries less what output and arguments share, where the compiler has no
    better figure of its own. ``parts``: the same as a plan has it, by its names, where the program says what is what.
    """

    arguments_bytes: int
    temporaries_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_bytes: int
    largest: tuple[Temporary, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "arguments_bytes": self.arguments_bytes,
            "temporaries_bytes": self.temporaries_bytes,
            "output_bytes": self.output_bytes,
            "aliased_bytes": self.aliased_bytes,
            "peak_bytes": self.peak_bytes,
            "largest": [temporary.to_json() for temporary in self.largest],
            **self.parts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A package that compiled, its version, and the one that JAX asks for, as a requirement (``0.0.42.*``)."""

    name: str
    version: str
    wanted: str

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "version": self.version, "wanted": self.wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """``target``: as it was asked for (``v5p:4x4x4``). ``flops_per_device``: of the products of matrices that the text
    shows, loops multiplied out; None where a loop does not say how often it runs. ``component_flops``: the same by
    component, of those that have a name. ``said``: what the compiler wrote of tensors that it made whole against its
    will, a line each. ``tools``: see ``compiled/reading/tool_chain.py``."""

    target: str
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    compile_seconds: float
    flops_per_device: int | None = None
    component_flops: Mapping[str, int] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "collectives": [collective.to_json() for collective in self.collectives],
            "memory": self.memory.to_json(),
            "compile_seconds": self.compile_seconds,
            "flops_per_device": self.flops_per_device,
            "component_flops": dict(self.component_flops),
            "said": list(self.said),
            "tools": [tool.to_json() for tool in self.tools],
        }
