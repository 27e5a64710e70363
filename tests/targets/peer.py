"""docs/beside-maxtext.md: the bytes that MaxText's own programs move, compared with the kept rows of the same steps here."""

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
        step="the same with the flag that exchanges tokens, its best",
        peer={"moved": 20.7, "temporaries": 15.1},
        peer_says="8.05 GB of it all-to-all",
        aim={"moved": 18, "temporaries": 14},
        case="mixtral-8x7b ep expert8 v5p:2x2x2 moe-all-to-all capacity_factor-1.25",
        why={
            "temporaries": "The gradients of all experts' weights are kept in bfloat16 until the optimizer uses them: "
            "one chip has one expert of each layer. The other temporaries are one layer's."
        },
    ),
    Beside(
        step="deepseek3-671b, 128 v5p chips, expert 8 x fsdp 16, 4,096 tokens a row, dropless, a ring of experts",
        peer={"moved": 753, "temporaries": 60.5, "seconds": 186},
        aim={"moved": 690, "temporaries": 55, "seconds": 150},
        case="deepseek3-671b ep fsdp16,expert8 v5p:4x4x8 moe-ring",
        why={
            "moved": "With fsdp 16 each chip gathers its 32 experts of every layer forward and again backward, and reduce-scatters "
            "their gradients: the layout and recomputation fix two thirds of all bytes. The ring of experts "
            "gathers every token of eight chips and reduce-scatters the outputs, forward and backward, and the tokens once more "
            "for the recomputation. Only keeping them for every layer would move less, and memory does not allow it. The minor "
            "hops over the slice add bytes as buffers, and halve the bytes on the links.",
            "temporaries": "The largest is a copy of all layers' down-projections at rest, made before the loop over layers, "
            "which reads them in another order of dims than they are stored in.",
        },
    ),
    Beside(
        step="the same with a buffer capacity of four times the even share of tokens",
        aim={"temporaries": 55, "seconds": 150},
        case="deepseek3-671b ep fsdp16,expert8 v5p:4x4x8 moe-ring buffer 4",
    ),
    Beside(
        step="the previous step under `ep-as-cp`, with capacity for all tokens",
        peer={"moved": 1244, "temporaries": 63.9, "seconds": 110},
        peer_says="467 GB of it MLA's keys and values, decompressed",
        aim={"moved": 750, "temporaries": 55, "seconds": 110},
        case="deepseek3-671b ep-as-cp fsdp16,expert8 v5p:4x4x8 moe-ring",
        why={
            "temporaries": "The ring's buffers have capacity for all tokens of eight chips, with or without the sequence over "
            "`expert`. Attention adds the rest compared with `ep`: a row is sharded over eight chips. Each of them decompresses the "
            "keys and values of the full row, eight times those of its own tokens, and holds them with their gradients. "
            "Ring attention, the step below, removes most of that.",
        },
    ),
    Beside(
        step="the same with ring attention",
        aim={"moved": 750, "temporaries": 55, "seconds": 110},
        case="deepseek3-671b ep-as-cp fsdp16,expert8 v5p:4x4x8 moe-ring attention-ring",
        why={
            "temporaries": "That copy of the down-projections, as under `ep`, is alone larger than the excess.",
            "seconds": "Each of the eight steps of the ring has its own attention kernels, forward and backward. The time is "
            "that of a machine with other work.",
        },
    ),
    Beside(
        step="the same model, chips and rows under the best layout found: two experts per chip",
        aim={"moved": 400},
        case="deepseek3-671b ep fsdp1,expert128 v5p:4x4x8 buffer 1.5",
    ),
)
"""MaxText at its head of August 2026: bfloat16 weights, moments and computation, one row a chip, JAX 0.10.2, libtpu 0.0.42.

Bytes of all collectives of one device and step as buffer sizes, loops multiplied out; measured by compiling its own step.
"""

HEAD = """# Compared with MaxText

The same steps compiled by the same compiler (JAX 0.10.2, libtpu 0.0.42): MaxText's, at its head of August 2026, and
shardwright's. One row per chip; weights, moments and computation in bfloat16. *moved*: bytes of all collectives of one
device in one step, as buffer sizes, with loops multiplied out. *temporaries*: memory that the compiler allocates for a step in
addition to its arguments. *aim*: the target that was set before ours were compiled. The compiler refuses a program that does not
fit its chip; it compiled all of these.

MaxText's figures are measurements of its programs, kept in `tests/targets/peer.py`; ours are the kept rows of
[compiled.md](compiled.md). `python -m tests.targets.table --peer` prints this page from kept data and compiles nothing;
`python -m tests.targets.table --large` compiles everything again.

"""


def peer_page(rows: Mapping[str, Row], movements: Mapping[str, Movements]) -> str:
    """The full page, from the compiled rows."""
    table = [
        "| step | | moved | temporaries | compiled in | |",
        "|---|---|---:|---:|---:|---|",
        *(line for one in PEER for line in _lines(one, rows)),
    ]
    compiled = [(one, rows[one.case]) for one in PEER if one.case is not None and one.case in rows]
    missed = [text for one, row in compiled for text in _missed(one, row, movements.get(row.case))]
    section = "\n## Where an aim is missed\n\n" + "\n\n".join(missed) + "\n" if missed else ""
    return HEAD + "\n".join(table) + "\n" + section + _buffers(rows)


def figures_of(row: Row) -> dict[Measure, float]:
    """The compared figures of a kept row."""
    return {"moved": row.compiled_bytes / GB, "temporaries": row.temporaries / GB, "seconds": round(row.seconds)}


def missed_aims(one: Beside, row: Row) -> tuple[Measure, ...]:
    """The aims of a step that its row does not meet."""
    ours = figures_of(row)
    return tuple(measure for measure, most in one.aim.items() if ours[measure] > most)


def _lines(one: Beside, rows: Mapping[str, Row]) -> Iterator[str]:
    heads = iter((one.step, *[""] * 2))
    if one.peer:
        yield _line(next(heads), "MaxText", one.peer, one.peer_says)
    if one.aim:
        yield _line(next(heads), "aim, at most", one.aim, "")
    if one.case is None:
        yield _line(next(heads), "ours", {}, "none: no layout here moves tokens this way")
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
    """A number as text: no decimals from 100 on, else at most two.

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
        f"Of the {row.temporaries / GB:.1f} GB allocated {in_use / GB:.1f} are in use at the peak, and {gradients / GB:.1f} "
        "are the gradients of all weights."
    )


def _most_moved(found: Movements) -> list[Movement]:
    return sorted(found.lines, key=lambda line: -line.compiled_bytes)[:5]


def _movement(line: Movement, row: Row) -> str:
    share = line.compiled_bytes / row.compiled_bytes
    component = f"`{line.component}`, " if line.component else ""
    return f"{component}{line.kind} over {'/'.join(line.axes)}, {_number(line.compiled_bytes / GB)} GB ({share:.0%})"


def _held(held: Held) -> str:
    what = " ".join(word for word in (held.component and f"`{held.component}`", held.phase, held.op) if word)
    times = f", {held.num_values} such" if held.num_values > 1 else ""
    return f"{held.bytes_per_device / GB:.2f} GB {held.dtype} {list(held.shape)} of {what}{times}"


def _buffers(rows: Mapping[str, Row]) -> str:
    """Bytes moved under the best layout by buffer capacity, and the meaning of a smaller capacity."""
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

With two experts per chip no weight of an expert is gathered: a ragged all-to-all over all chips sends tokens to their experts.
In a dropless run all tokens of all chips could be assigned to the two experts of one chip. A buffer for that would hold 32 times
the even share, which by the plan's estimate exceeds the memory of a v5p. So these programs were compiled with `--expert-buffer`: a capacity of that
many even shares of tokens on each chip. A run whose routing sends more to a chip **stops with a message**: no token is dropped,
the step is not saved, and the run resumes from its last checkpoint with a larger buffer or without the option. Without it buffers have 1.25 even
shares, and JAX compiles the step again with larger ones where a chip receives more ([SW405](findings/SW405.md)). Only the training run shows
whether a router stays below; nothing here measures it. The collectives send only the tokens, whatever the capacity. But all
figures here count buffers, so they include the capacity.

"""
