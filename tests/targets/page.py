"""docs/compiled.md: predictions compared with the programs of real compilers, including the bad figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.compiled.agreement.rewrites import REWRITES, family
from tests.targets.cases import Case
from tests.targets.row import Row

HEAD = """# What compilers make of a plan

The train step of real models, including optimizer and donation, compiled for real targets on a machine that has none of
them, and read back. `make test-targets` installs the compilers and tests some of these cases;
`python -m tests.targets.table --large` compiles them all and writes this page. The predictions are stored in
`tests/targets/predicted.json`. A case is refused if its current plan differs from them, so that no prediction is adjusted
to a comparison. [compiled-moe.md](compiled-moe.md) has six of the cases collective by collective, and
[beside-maxtext.md](beside-maxtext.md) compares some with MaxText's programs.

- *moved*: bytes of all collectives of one step on one device, with the trip counts of loops: of operand or result, the
  larger. A ragged exchange counts in the plan as the tokens of an even routing, and in the program as its buffers.
- Over an entire TPU slice gathers and scatters go in two hops (`--hops two`).
- *same*, *rewritten*, *unmatched*: kinds of collective by component and axes. A rewrite is one of a closed list
  (`compiled/agreement/rewrites.py`), and *by rewrites* is the share of all bytes that only rewrites explain.
- *error*: the difference in bytes of those that are the same.
- *memory*: of one device at the peak of a step, including arguments, as its compiler reports it; weights, gradients and
  moments are stored in bfloat16, and all is computed in it. The estimate for TPU and GPU was developed with some of these
  programs; [compiled-policies.md](compiled-policies.md) has cases that were predicted before. *temporaries*: the memory
  that the compiler allocates for everything but the arguments.
- *seconds*: of compiling, on two cores that may have had other work.

"""


class Limit(NamedTuple):
    """A requirement for every case."""

    what: str
    most: str
    value: Callable[[Row], float]
    limit: float


LIMITS = (
    Limit("collectives that nothing explains", "none", lambda row: len(row.unmatched), 0),
    Limit("bytes by rewrites alone", "10% of all", lambda row: row.explained_share, 0.10),
    Limit("bytes of those that are the same", "1% off", lambda row: row.bytes_error, 0.01),
    Limit("memory at the peak", "10% off", lambda row: abs(row.memory_error), 0.10),
)

FAMILIES = {"gpu": "GPUs", "tpu": "TPUs", "cpu": "CPU"}

ON_CPU = (
    "XLA's CPU backend computes and sends bfloat16 as float32, twice the bytes, and has no ragged exchange: tokens are sent "
    "in chunks of the largest size. Kinds and axes of its collectives are those of the plan; their bytes and the memory are "
    "not those of a chip."
)
"""Why simulated devices miss."""

WHY: Mapping[str, str] = {}
"""Why a case on a chip misses a requirement, by its name, if known."""


def page(cases: Sequence[Case], found: Mapping[str, Row]) -> str:
    """The page of the cases that were compiled."""
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
    """The share of the bytes of all these cases that only rewrites explain."""
    compared = sum(row.compared_bytes for row in rows)
    return sum(row.explained_share * row.compared_bytes for row in rows) / compared if compared else 0.0


def _summary(rows: Sequence[Row]) -> str:
    chips = [row for row in rows if family(row.target) != "cpu"]
    exact = sum(row.bytes_error == 0 and not row.unmatched for row in rows)
    shares = ", ".join(f"{by_rewrites(some):.1%} on {FAMILIES[name]}" for name, some in _families(rows).items())
    return (
        f"{len(rows)} cases. {exact} of them move exactly the predicted bytes, except for rewrites; "
        f"{sum(bool(row.unmatched) for row in rows)} have a collective that nothing explains. "
        f"Rewrites alone explain {by_rewrites(rows):.1%} of the bytes of all cases: {shares}. "
        f"Memory is off by {_mean([abs(row.memory_error) for row in chips]):.1%} on average on chips, and by "
        f"{_mean([abs(row.memory_error) for row in rows]):.1%} with CPU. On TPU more memory is allocated than is in "
        f"use at the peak, by up to {_gb(max([_unused(row) for row in rows if family(row.target) == 'tpu'], default=0))}."
    )


def _unused(row: Row) -> int:
    """The allocated bytes that are not in use at the peak."""
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
    yield "## Requirements for every case"
    yield ""
    yield f"| | at most | {' | '.join(f'{FAMILIES[name]} that meet it' for name in families)} |"
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
        misses = [
            f"{row.explained_share:.1%} by rewrites" if row.explained_share > LIMITS[1].limit else "",
            f"bytes {row.bytes_error:.1%} off" if row.bytes_error > LIMITS[2].limit else "",
            f"memory {row.memory_error:+.1%}" if abs(row.memory_error) > LIMITS[3].limit else "",
            *(f"unmatched: {one}" for one in row.unmatched),
        ]
        why = f". {WHY[row.case]}" if row.case in WHY else ""
        yield f"- {row.case}: {'; '.join(part for part in misses if part)}{why}"
    if any(family(row.target) == "cpu" for row in missing):
        yield ""
        yield ON_CPU


def _rewrites(rows: Sequence[Row]) -> Iterator[str]:
    used = sorted({name for row in rows for name in row.explained})
    if not used:
        return
    yield "## Rewrites that occurred"
    yield ""
    for name in used:
        yield f"- *{name}*: {REWRITES[name].reason}"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
