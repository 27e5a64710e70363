"""A compiled program in the core's words: what it moves, and the memory that it takes, on one device."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.plan import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """A collective of a compiled program, ``count_per_step`` times a step, loops multiplied out.

    ``kind``: as in a plan (``permute``, ``send-recv`` too). ``axes``: the mesh axes along which the devices of a group,
    or the ends of a permutation's pairs, differ; mesh order. ``bytes_per_device``: of its operand or result on one
    device, whichever is larger, for one execution. ``component``, ``phase`` and ``tensors``: from the scopes that the
    engine writes; None and empty where the compiler kept none. ``source``: ``file:line``. ``overlapped``: whether the
    compiler begins it early and waits for it later; None where it does not say. ``num_ops``: the instructions of the
    text that this row stands for.
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
            **({"ragged": True} if self.ragged else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """A value that a step needs for a while, by its bytes, and what it is: see ``CompiledCollective``."""

    bytes_per_device: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    component: str | None = None
    phase: Phase | None = None
    source: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "bytes_per_device": self.bytes_per_device,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "op": self.op,
            "component": self.component,
            "phase": self.phase,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes of a program on one device, as its compiler gives them, and its largest temporaries as the text shows them.

    ``peak_bytes``: arguments, output and temporaries less what output and arguments share, where the compiler has no
    better figure of its own.
    """

    arguments_bytes: int
    temporaries_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_bytes: int
    largest: tuple[Temporary, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "arguments_bytes": self.arguments_bytes,
            "temporaries_bytes": self.temporaries_bytes,
            "output_bytes": self.output_bytes,
            "aliased_bytes": self.aliased_bytes,
            "peak_bytes": self.peak_bytes,
            "largest": [temporary.to_json() for temporary in self.largest],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """``target``: as it was asked for (``v5p:4x4x4``). ``flops_per_device``: of the products of matrices that the text
    shows, loops multiplied out; None where a loop does not say how often it runs."""

    target: str
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    compile_seconds: float
    flops_per_device: int | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "collectives": [collective.to_json() for collective in self.collectives],
            "memory": self.memory.to_json(),
            "compile_seconds": self.compile_seconds,
            "flops_per_device": self.flops_per_device,
        }
