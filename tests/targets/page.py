"""docs/compiled.md: what was predicted beside what real compilers made, the bad figures too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwright.core.installed import installed_version

if TYPE_CHECKING:
    from tests.targets.cases import Case
    from tests.targets.table import Row

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
HEAD = """# What compilers make of a plan

The train step of real models, optimizer and donation included, compiled for real targets on a machine that has none of
them, and read back. `make test-targets` installs the compilers and tests some of these cases;
`python -m tests.targets.table --large` compiles them all and writes this page. What is predicted lies in
`tests/targets/predicted.json` and is refused where the plan of today says something else, so that no prediction can
follow a comparison.

- *moved*: bytes of all collectives of one step on one device, loops multiplied out: of operand or result, the larger.
  A ragged exchange counts as the tokens that an even choice sends in the plan, and as its buffers in the program.
- *same*, *rewritten*, *unmatched*: kinds of collective by component and axes. A rewrite is one of a closed list
  (`compiled/rewrites.py`), and *by rewrites* is the share of all bytes that only they explain.
- *error*: of those that are the same, by how many bytes they differ.
- *memory*: of one device at the peak of a step; weights, gradients and moments rest in bfloat16, as all is computed.
  CPU computes bfloat16 in float32, so that there the bytes of collectives and most of the memory are twice what is
  predicted for a chip.
- *seconds*: of compiling, on two cores that may have had other work.

"""


def page(cases: Sequence[Case], found: Mapping[str, Row]) -> str:
    """The whole page, of the cases that were compiled."""
    rows = [found[case.name] for case in cases]
    versions = ", ".join(f"{name} {number}" for name in COMPILERS if (number := installed_version(name)))
    lines = [
        "| case | rows x tokens | moved, predicted | compiled | same | rewritten | by rewrites | unmatched | error | memory, predicted | compiled | error | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_line(case, found[case.name]) for case in cases),
    ]
    worst = max(rows, key=lambda row: abs(row.memory_error))
    exact = sum(row.bytes_error == 0 and not row.unmatched for row in rows)
    summary = (
        f"{len(rows)} cases. {exact} of them move what was predicted to the byte, but for rewrites; "
        f"{sum(bool(row.unmatched) for row in rows)} have a collective that nothing explains. "
        f"Memory is off by {_mean([abs(row.memory_error) for row in rows]):.1%} on average and by "
        f"{worst.memory_error:+.1%} at worst ({worst.case}).\n"
    )
    used = sorted({name for row in rows for name in row.explained})
    rewrites = f"\nRewrites that were met: {', '.join(used)}.\n" if used else ""
    unmatched = [f"- {row.case}: {one}" for row in rows for one in row.unmatched]
    told = "\nUnmatched:\n\n" + "\n".join(unmatched) + "\n" if unmatched else ""
    return f"{HEAD}{summary}\n" + "\n".join(lines) + "\n" + rewrites + told + f"\nWith {versions}.\n"


def _line(case: Case, row: Row) -> str:
    return (
        f"| {case.name} | {case.batch} x {case.length:,} | {_gb(row.predicted_bytes)} | {_gb(row.compiled_bytes)} | "
        f"{row.matched} | {len(row.explained)} | {row.explained_share:.1%} | {len(row.unmatched)} | {row.bytes_error:.2%} | "
        f"{_gb(row.predicted_memory)} | {_gb(row.peak)} | {row.memory_error:+.1%} | {row.seconds:.0f} |"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
