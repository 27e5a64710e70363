"""docs/compiled.md: what was predicted beside what real compilers made, the bad figures too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.compiled.agreement.rewrites import REWRITES, family
from tests.targets.cases import Case
from tests.targets.row import Row

HEAD = """# What compilers make of a plan

The train step of real models, optimizer and donation included, compiled for real targets on a machine that has none of
them, and read back. `make test-targets` installs the compilers and tests some of these cases;
`python -m tests.targets.table --large` compiles them all and writes this page. What is predicted lies in
`tests/targets/predicted.json` and is refused where the plan of today says something else, so that no prediction can
follow a comparison. [compiled-moe.md](compiled-moe.md) has six of the cases collective by collective, and
[beside-maxtext.md](beside-maxtext.md) some beside what MaxText's programs move.

- *moved*: bytes of all collectives of one step on one device, loops multiplied out: of operand or result, the larger.
  A ragged exchange counts as the tokens that an even choice sends in the plan, and as its buffers in the program.
- *same*, *rewritten*, *unmatched*: kinds of collective by component and axes. A rewrite is one of a closed list
  (`compiled/agreement/rewrites.py`), and *by rewrites* is the share of all bytes that only they explain.
- *error*: of those that are the same, by how many bytes they differ.
- *memory*: of one device at the peak of a step, arguments too, as its compiler says; weights, gradients and moments rest
  in bfloat16, as all is computed. What the estimate counts for TPU and GPU was worked out beside these programs, so its
  error says how well it describes them, not how well it foretells others. *temporaries*: the room that the compiler sets
  aside for all but the arguments.
- *seconds*: of compiling, on two cores that may have had other work.

"""


class Limit(NamedTuple):
    """What is asked of every case."""

    what: str
    most: str
    value: Callable[[Row], float]
    limit: float


LIMITS = (
    Limit("collectives that nothing explains", "none", lambda row: len(row.unmatched), 0),
    Limit("bytes by rewrites alone", "10% of all", lambda row: row.explained_share, 0.10),
    Limit("bytes of what is the same", "1% off", lambda row: row.bytes_error, 0.01),
    Limit("memory at the peak", "10% off", lambda row: abs(row.memory_error), 0.10),
)

FAMILIES = {"gpu": "GPUs", "tpu": "TPUs", "cpu": "CPU"}

ON_CPU = (
    "XLA's CPU backend computes and sends bfloat16 as float32, twice the bytes, and has no ragged exchange: tokens go in "
    "chunks with room for the most that may come. Kinds and axes of its collectives are the plan's; their bytes and the "
    "memory are not a chip's."
)
"""Why simulated devices miss."""

WHY: Mapping[str, str] = {}
"""Why a case on a chip misses, by its name, where that is known."""


def page(cases: Sequence[Case], found: Mapping[str, Row]) -> str:
    """The whole page, of the cases that were compiled."""
    rows = [found[case.name] for case in cases]
    versions = dict.fromkeys(version for row in rows for version in row.versions)
    parts = [
        HEAD + _summary(rows),
        "\n".join(_table(cases, found)),
        "\n".join(_limits(rows)),
        "\n".join(_misses(rows)),
        "\n".join(_rewrites(rows)),
        f"With {', '.join(versions)}." if versions else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_rewrites(rows: Sequence[Row]) -> float:
    """The share of the bytes of all these cases together that only rewrites explain."""
    compared = sum(row.compared_bytes for row in rows)
    return sum(row.explained_share * row.compared_bytes for row in rows) / compared if compared else 0.0


def _summary(rows: Sequence[Row]) -> str:
    chips = [row for row in rows if family(row.target) != "cpu"]
    exact = sum(row.bytes_error == 0 and not row.unmatched for row in rows)
    shares = ", ".join(f"{by_rewrites(some):.1%} on {FAMILIES[name]}" for name, some in _families(rows).items())
    return (
        f"{len(rows)} cases. {exact} of them move what was predicted to the byte, but for rewrites; "
        f"{sum(bool(row.unmatched) for row in rows)} have a collective that nothing explains. "
        f"Rewrites alone explain {by_rewrites(rows):.1%} of the bytes of all cases: {shares}. "
        f"Memory is off by {_mean([abs(row.memory_error) for row in chips]):.1%} on average on chips, and by "
        f"{_mean([abs(row.memory_error) for row in rows]):.1%} with CPU. On TPU the room set aside is larger than what is in "
        f"use at the peak, by up to {_gb(max([_unused(row) for row in rows if family(row.target) == 'tpu'], default=0))}."
    )


def _unused(row: Row) -> int:
    """Of the room set aside, what is not in use at the peak."""
    return row.arguments + row.temporaries - row.peak


def _families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = {name: [row for row in rows if family(row.target) == name] for name in FAMILIES}
    return {name: some for name, some in found.items() if some}


def _table(cases: Sequence[Case], found: Mapping[str, Row]) -> Iterator[str]:
    yield (
        "| case | rows x tokens | moved, predicted | compiled | same | rewritten | by rewrites | unmatched | error "
        "| memory, predicted | compiled | error | temporaries | seconds |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for case in cases:
        row = found[case.name]
        yield (
            f"| {case.name} | {case.batch} x {case.length:,} | {_gb(row.predicted_bytes)} | {_gb(row.compiled_bytes)} | "
            f"{row.matched} | {len(row.explained)} | {row.explained_share:.1%} | {len(row.unmatched)} | "
            f"{row.bytes_error:.2%} | {_gb(row.predicted_memory)} | {_gb(row.peak)} | {row.memory_error:+.1%} | "
            f"{_gb(row.temporaries)} | {row.seconds:.0f} |"
        )


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    families = _families(rows)
    yield "## What is asked of every case"
    yield ""
    yield f"| | asked | {' | '.join(f'{FAMILIES[name]} that hold' for name in families)} |"
    yield f"|---|---|{'---:|' * len(families)}"
    for limit in LIMITS:
        cells = " | ".join(f"{len(some) - len(_missing(limit, some))} of {len(some)}" for some in families.values())
        yield f"| {limit.what} | {limit.most} | {cells} |"


def _missing(limit: Limit, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if limit.value(row) > limit.limit]


def _misses(rows: Sequence[Row]) -> Iterator[str]:
    missing = [row for row in rows if any(_missing(limit, [row]) for limit in LIMITS)]
    if not missing:
        return
    yield "Those that miss:"
    yield ""
    for row in missing:
        said = [
            f"{row.explained_share:.1%} by rewrites" if row.explained_share > LIMITS[1].limit else "",
            f"bytes {row.bytes_error:.1%} off" if row.bytes_error > LIMITS[2].limit else "",
            f"memory {row.memory_error:+.1%}" if abs(row.memory_error) > LIMITS[3].limit else "",
            *(f"unmatched: {one}" for one in row.unmatched),
        ]
        why = f". {WHY[row.case]}" if row.case in WHY else ""
        yield f"- {row.case}: {'; '.join(part for part in said if part)}{why}"
    if any(family(row.target) == "cpu" for row in missing):
        yield ""
        yield ON_CPU


def _rewrites(rows: Sequence[Row]) -> Iterator[str]:
    used = sorted({name for row in rows for name in row.explained})
    if not used:
        return
    yield "## Rewrites that were met"
    yield ""
    for name in used:
        yield f"- *{name}*: {REWRITES[name].reason}"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
