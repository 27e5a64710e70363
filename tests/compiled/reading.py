"""Reads texts of compiled programs, stored or written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.compiled.reading.read import read
from shardwright.core.mesh.mesh import Mesh

FOLDER = Path(__file__).parent / "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The memory of a program as its compiler reports it."""

    arguments_bytes: int = 0
    temporaries_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0


def kept(name: str) -> str:
    """A text of ``make_texts``: `every_kind.v5p`."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def program_of(text: str, mesh: Mesh, target: str = "v5p:2x2x2") -> CompiledProgram:
    return read(text, mesh, target=target, stats=Sizes(), compile_seconds=0.0)


def bytes_by_kind(program: CompiledProgram) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes of a step by kind and axes, with the trip counts of loops."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in program.collectives:
        found[one.kind, one.axes] += one.bytes_per_device * one.count_per_step
    return dict(found)


def entry(lines: str, *, partitions: int = 8, before: str = "") -> str:
    """A program whose entry has these lines, the last of them the result."""
    body = [f"  {line.strip()}" for line in lines.strip().splitlines()]
    body[-1] = body[-1].replace("  ", "  ROOT ", 1)
    head = f"HloModule jit_step, is_scheduled=true, num_partitions={partitions}\n\n"
    return f"{head}{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n" + "\n".join(body) + "\n}\n"


def only(program: CompiledProgram) -> CompiledCollective:
    """The one collective of a program."""
    (found,) = program.collectives
    return found
