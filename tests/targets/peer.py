"""docs/beside-maxtext.md: what MaxText's own programs move, measured, beside the kept rows of the same steps here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.targets.cases import CASES, LARGE, Case
from tests.targets.movements import Held, Movement, Movements
from tests.targets.predicted import kept
from tests.targets.row import GB, Row

Measure = Literal["moved", "temporaries", "seconds"]

MEASURES: Mapping[Measure, str] = {"moved": "GB", "temporaries": "GB", "seconds": "s"}
"""What is compared, with its unit: bytes of all collectives, bytes of temporaries, seconds of compiling."""

Figures = Mapping[Measure, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A step that both have, or one of the two. ``case``: the name of ours. ``why``: of what may miss its aim."""

    step: str
    peer: Figures = field(default_factory=dict)
    peer_says: str = ""
    aim: Figures = field(default_factory=dict)
    case: str | None = None
    why: Mapping[Measure, str] = field(default_factory=dict)


TWO_A_CHIP = "fsdp=1,expert=128"

PEER: tuple[Beside, ...] = (
    Beside(
        step="mixtral-8x7b, 8 v5p chips, expert 8, 2,048 tokens a row, capacity 1.25, default rules",
        peer={"moved": 294, "temporaries": 20.7},
        peer_says="no all-to-all at all",
    ),
    Beside(
        step="the same with the flag that has tokens exchanged, its best",
        peer={"moved": 20.7, "temporaries": 15.1},
        peer_says="8.05 GB of it all-to-all",
        aim={"moved": 18, "temporaries": 14},
        case="mixtral-8x7b ep expert8 v5p:2x2x2 moe-all-to-all capacity_factor-1.25",
        why={
            "temporaries": "The gradients of the experts' weights are there whole, in bfloat16, until the optimizer has them: "
            "one chip has one expert of each layer. What is beside them is one layer's."
        },
    ),
    Beside(
        step="deepseek3-671b, 128 v5p chips, expert 8 x fsdp 16, 4,096 tokens a row, dropless, a ring of experts",
        peer={"moved": 753, "temporaries": 60.5, "seconds": 186},
        aim={"moved": 690, "temporaries": 55, "seconds": 150},
        case="deepseek3-671b ep fsdp16,expert8 v5p:4x4x8 moe-ring",
        why={
            "moved": "With fsdp 16 each chip gathers its 32 experts of every layer forward and again backward, and scatters "
            "their gradients: two thirds of all bytes are fixed by the layout and by recomputing. The ring of experts "
            "gathers every token of eight chips and scatters the outputs, forward and backward, and the tokens once more "
            "for the recomputation; only keeping them for every layer, for which there is no room, would move less. The minor hops "
            "over the slice come on top as buffers, and halve what is on the links.",
            "temporaries": "The largest is a copy of all layers' down-projections at rest, made before the loop over layers, "
            "which reads them in another order of dims than they rest in.",
        },
    ),
    Beside(
        step="the same with room for four times the even share of tokens",
        aim={"temporaries": 55, "seconds": 150},
        case="deepseek3-671b ep fsdp16,expert8 v5p:4x4x8 moe-ring buffer 4",
    ),
    Beside(
        step="the step before under `ep-as-cp`, with room for all",
        peer={"moved": 1244, "temporaries": 63.9, "seconds": 110},
        peer_says="467 GB of it MLA's keys and values, decompressed",
        aim={"moved": 750, "temporaries": 55, "seconds": 110},
        case="deepseek3-671b ep-as-cp fsdp16,expert8 v5p:4x4x8 moe-ring",
        why={
            "temporaries": "The ring's buffers have room for all tokens of eight chips, with or without the sequence over "
            "`expert`. What comes on top of `ep` is attention's: a row lies over eight chips, each of which decompresses the "
            "keys and values of the whole row, eight times those of its own tokens, and holds them with their gradients. "
            "Keys that go around a ring, the step below, take most of that away.",
        },
    ),
    Beside(
        step="the same with keys that go around a ring",
        aim={"moved": 750, "temporaries": 55, "seconds": 110},
        case="deepseek3-671b ep-as-cp fsdp16,expert8 v5p:4x4x8 moe-ring attention-ring",
        why={
            "temporaries": "That copy of the down-projections, as under `ep`, is alone larger than what is missed.",
            "seconds": "Each of the eight turns of the ring has its own kernels of attention, forward and backward. The time is "
            "that of a machine with other work.",
        },
    ),
    Beside(
        step="the same model, chips and rows under the best layout found: two experts a chip",
        aim={"moved": 400},
        case="deepseek3-671b ep fsdp1,expert128 v5p:4x4x8 buffer 1.5",
    ),
)
"""MaxText at its head of August 2026: bfloat16 weights, moments and computation, one row a chip, JAX 0.10.2, libtpu 0.0.42.

Bytes of all collectives of one device and step as buffer sizes, loops multiplied out; measured by compiling its own step.
"""

HEAD = """# Beside MaxText

The same steps compiled by the same compiler (JAX 0.10.2, libtpu 0.0.42): MaxText's own, at its head of August 2026, and
shardwright's. One row a chip; weights, moments and computation in bfloat16. *moved*: bytes of all collectives of one
device in one step, as buffer sizes, loops multiplied out. *temporaries*: what the compiler sets aside for a step beside
its arguments. *aim*: what was set before ours were compiled. A program that does not fit its chip is refused by the
compiler; all of these were compiled.

MaxText's figures are measurements of its programs, kept in `tests/targets/peer.py`; ours are the kept rows of
[compiled.md](compiled.md). `python -m tests.targets.table --peer` prints this page from what is kept and compiles nothing;
`python -m tests.targets.table --large` compiles all of it again.

"""


def peer_page(rows: Mapping[str, Row], movements: Mapping[str, Movements]) -> str:
    """The whole page, of what was compiled."""
    table = [
        "| step | | moved | temporaries | compiled in | |",
        "|---|---|---:|---:|---:|---|",
        *(line for one in PEER for line in _lines(one, rows)),
    ]
    compiled = [(one, rows[one.case]) for one in PEER if one.case is not None and one.case in rows]
    missed = [text for one, row in compiled for text in _missed(one, row, movements.get(row.case))]
    told = "\n## Where an aim is missed\n\n" + "\n\n".join(missed) + "\n" if missed else ""
    return HEAD + "\n".join(table) + "\n" + told + _buffers(rows)


def figures_of(row: Row) -> dict[Measure, float]:
    """What is compared of a kept row."""
    return {"moved": row.compiled_bytes / GB, "temporaries": row.temporaries / GB, "seconds": round(row.seconds)}


def missed_aims(one: Beside, row: Row) -> tuple[Measure, ...]:
    """Those of a step's aims that its row does not meet."""
    ours = figures_of(row)
    return tuple(measure for measure, most in one.aim.items() if ours[measure] > most)


def _lines(one: Beside, rows: Mapping[str, Row]) -> Iterator[str]:
    heads = iter((one.step, *[""] * 2))
    if one.peer:
        yield _line(next(heads), "MaxText", one.peer, one.peer_says)
    if one.aim:
        yield _line(next(heads), "aim, at most", one.aim, "")
    if one.case is None:
        yield _line(next(heads), "ours", {}, "none: no layout here moves tokens so")
    elif one.case in rows:
        missed = missed_aims(one, rows[one.case])
        yield _line(
            next(heads), "ours", figures_of(rows[one.case]), f"missed: {', '.join(missed)}" if missed else "met"
        )
    else:
        yield _line(next(heads), "ours", {}, "not compiled yet")


def _line(step: str, whose: str, figures: Figures, note: str) -> str:
    cells = " | ".join(f"{_number(figures[m])} {MEASURES[m]}" if m in figures else "" for m in MEASURES)
    return f"| {step} | {whose} | {cells} | {note} |"


def _number(value: float) -> str:
    """With as many figures as it is worth.

    >>> _number(1244), _number(20.7), _number(8.05), _number(17.975), _number(55)
    ('1,244', '20.7', '8.05', '17.98', '55')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def _missed(one: Beside, row: Row, found: Movements | None) -> Iterator[str]:
    ours = figures_of(row)
    for measure in missed_aims(one, row):
        beyond = ours[measure] - one.aim[measure]
        lines = [f"**{row.case}: {measure}**, {_number(beyond)} {MEASURES[measure]} beyond its aim."]
        if found is not None and measure == "moved":
            lines += ["The largest: " + "; ".join(_movement(line, row) for line in _most_moved(found)) + "."]
        if found is not None and measure == "temporaries":
            lines += ["The largest: " + "; ".join(_held(held) for held in found.largest[:3]) + "."]
            lines += [_in_use(row)]
        lines += [one.why[measure]] if measure in one.why else []
        yield " ".join(lines)


def _in_use(row: Row) -> str:
    gradients = kept()[row.case]["memory gradients_bytes"]
    in_use = row.peak - row.arguments
    return (
        f"Of the {row.temporaries / GB:.1f} GB set aside {in_use / GB:.1f} are in use at the peak, and {gradients / GB:.1f} "
        "are the gradients of all weights."
    )


def _most_moved(found: Movements) -> list[Movement]:
    return sorted(found.lines, key=lambda line: -line.compiled_bytes)[:5]


def _movement(line: Movement, row: Row) -> str:
    share = line.compiled_bytes / row.compiled_bytes
    component = f"`{line.component}`, " if line.component else ""
    return f"{component}{line.kind} over {'/'.join(line.axes)}, {_number(line.compiled_bytes / GB)} GB ({share:.0%})"


def _held(held: Held) -> str:
    what = " ".join(part for part in (held.component and f"`{held.component}`", held.phase, held.op) if part)
    times = f", {held.num_values} such" if held.num_values > 1 else ""
    return f"{held.bytes_per_device / GB:.2f} GB {held.dtype} {list(held.shape)} of {what}{times}"


def _buffers(rows: Mapping[str, Row]) -> str:
    """What the best layout moves by how much room its buffers have, and what having less of it means."""
    cases = [case for case in (*CASES, *LARGE) if case.mesh == TWO_A_CHIP and case.name in rows]
    if not cases:
        return ""
    lines = [
        "| `--expert-buffer` | moved, as buffers | of it predicted, as tokens | temporaries | memory at the peak | compiled in |",
        "|---:|---:|---:|---:|---:|---:|",
        *(_buffer_line(case, rows[case.name]) for case in cases),
    ]
    return BUFFERS + "\n".join(lines) + "\n"


def _buffer_line(case: Case, row: Row) -> str:
    return (
        f"| {case.expert_buffer:g} | {row.compiled_bytes / GB:,.0f} GB | {row.predicted_bytes / GB:,.0f} GB | "
        f"{row.temporaries / GB:.1f} GB | {row.peak / GB:.1f} GB | {row.seconds:.0f} s |"
    )


BUFFERS = """
## What the buffer means

With two experts a chip no weight of an expert is gathered; tokens travel to their experts by a ragged all-to-all over all
chips. Dropless, all tokens of all chips could choose the two experts of one chip. A buffer for that would hold 32 times
the even share, which by the plan's estimate no v5p has room for. So this layout needs `--expert-buffer`: room for that many
even shares of tokens on each chip. A run whose routing sends more to a chip **stops with a message**: no token is dropped,
the step is not saved, and the run goes on from its last checkpoint with a larger buffer or without one. Whether a router stays
below is for the training run to show; nothing here measures it. What travels are the tokens, whatever the room, but as
buffers, which is how all figures here count, the room counts.

"""
