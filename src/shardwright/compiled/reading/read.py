"""Reads a compiled program: the only entry point to the files of this folder."""

from __future__ import annotations

from typing import Protocol

from shardwright.compiled.reading.collectives import read_collectives
from shardwright.compiled.reading.flops import read_flops
from shardwright.compiled.reading.products import read_products
from shardwright.compiled.reading.program import CompiledMemory, CompiledProgram
from shardwright.compiled.reading.temporaries import largest_temporaries
from shardwright.compiled.text.calls import callers_of, executions
from shardwright.compiled.text.hlo import parse
from shardwright.compiled.text.numbering import numbering
from shardwright.compiled.text.origins import Sources
from shardwright.core.mesh.mesh import Mesh

SIMULATED = "cpu"


class Stats(Protocol):
    """The memory of a program as its compiler reports it, in bytes on one device."""

    @property
    def arguments_bytes(self) -> int: ...
    @property
    def temporaries_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def aliased_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...


def read(text: str, mesh: Mesh, *, target: str, stats: Stats, compile_seconds: float) -> CompiledProgram:
    """One step of a program on one device, from its text and from the memory that its compiler reports.

    ``mesh``: the mesh that it was compiled for. ``target``: as requested. Raises InputError if the text is not that of
    a compiled program, or is for another number of devices.
    """
    program = parse(text)
    callers = callers_of(program)
    runs = executions(program, callers)
    sources = Sources.of(program.tables)
    # A simulated device runs sequentially, so the order of its text shows no overlap.
    overlap_known = target.partition(":")[0] != SIMULATED
    numbers = numbering(mesh, program.num_partitions)
    flops = read_flops(program, runs)
    return CompiledProgram(
        target=target,
        collectives=read_collectives(program, callers, runs, numbers, sources, overlap_known=overlap_known),
        memory=CompiledMemory(
            arguments_bytes=stats.arguments_bytes,
            temporaries_bytes=stats.temporaries_bytes,
            output_bytes=stats.output_bytes,
            aliased_bytes=stats.aliased_bytes,
            peak_bytes=stats.peak_bytes,
            host_bytes=stats.host_bytes,
            largest=largest_temporaries(program, callers, runs, sources),
        ),
        compile_seconds=compile_seconds,
        flops_per_device=None if flops is None else int(sum(flops.values())),
        products=read_products(program, runs, sources),
        component_flops={name: int(number) for name, number in (flops or {}).items() if name is not None},
    )
