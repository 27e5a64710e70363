"""Do candidates of a search keep their order when they are compiled? Predicted and compiled bytes and memory, for chips that need not be there.

python -m benchmarks.search_compiled [--only TEXT] [--most N]: compiles N more candidates, one after the other
python -m benchmarks.search_compiled --page: writes the table in docs/search.md of those that are there

The models have few layers and their real widths. The candidates of a model and chips are answers of a search of 24, from the first to the last at
equal distances: layouts, sizes, movements and recomputation as the search chose them. They are compiled as `shardwright search --compile` does. Results
are kept after every one, so a run goes on from the last. It needs the compilers of `make test-targets`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER as RESULTS
from shardwright.cli.searching.apart import FailedApartError, call_apart
from shardwright.cli.searching.compiling import compile_answer
from shardwright.cli.searching.rows import Row, rows_of
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.layouts import load_layout, preset_names
from shardwright.search.answers import answered
from shardwright.search.searching import Search
from shardwright.search.solving import Solver
from shardwright.search.space.policies import policies_of
from shardwright.search.space.settings import Free
from shardwright.search.space.space import space_of

FILE = RESULTS / "search_compiled.json"
PAGE = Path(__file__).parent.parent / "docs" / "search.md"
BEGIN, END = "<!-- compiled -->", "<!-- end of compiled -->"
KEPT = 24
GIB = 2**30

MEASURES = {
    "bytes moved": "moved_bytes",
    "memory": "memory_bytes",
    "seconds on links": "link_seconds",
    "step": "step_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A search, and how many of its answers are compiled. ``layers``: of the model, whose widths are the real ones."""

    model: str
    chips: str
    layers: int
    number: int
    length: int = 4096

    @property
    def name(self) -> str:
        return f"{self.model} {self.chips}"

    @property
    def options(self) -> PlanOptions:
        return PlanOptions(
            chips=self.chips,
            batch=32,
            length=self.length,
            set=((f"num_layers={self.layers}",),),
            weights_dtype="bfloat16",
            moments_dtype="bfloat16",
        )


QUESTIONS = (
    Question(model="llama3-8b", chips="h100:2x4", layers=4, number=4),
    Question(model="deepseek3-16b", chips="h100:2x8", layers=3, number=4),
    Question(model="llama3-1b", chips="b200:2x4", layers=4, number=4),
    Question(model="mixtral-8x7b", chips="b200:1x8", layers=2, number=4),
    Question(model="llama3-8b", chips="v5p:2x2x2", layers=4, number=2),
    Question(model="mixtral-8x7b", chips="v5p:2x2x4", layers=2, number=2),
    Question(model="llama3-1b", chips="v6e:2x4", layers=4, number=2),
    Question(model="deepseek3-16b", chips="v6e:4x4", layers=3, number=2),
)


def candidates(question: Question, budget_s: float) -> Sequence[Row]:
    """Answers of a search at equal distances, from the first to the last."""
    options = question.options
    typed = typed_request(question.model, "fsdp", options)
    machine = typed.machine
    assert machine is not None
    free = Free(policies=policies_of(typed.request.table, to_host=False))
    solver = Solver(request=typed.request, machine=machine, free=free)
    outcome = Search(solver, space_of(typed.request, machine), keep=KEPT, budget_s=budget_s).run()
    rows = rows_of(
        answered(solver, outcome.answers),
        question.model,
        options,
        [load_layout(name) for name in preset_names()],
        None,
    )
    last = len(rows) - 1
    places = [round(place * last / max(1, question.number - 1)) for place in range(question.number)]
    return [rows[place] for place in dict.fromkeys(places)]


def compiled(question: Question, row: Row) -> dict[str, Any]:
    about = {"question": question.name, "layers": question.layers, "text": row.text, "command": row.command}
    try:
        answer = call_apart(compile_answer, (question.model, row.name, row.file, row.options), lambda: True)
    except FailedApartError as error:
        return {**about, "failed": error.line}
    return {**about, **answer.to_json()}


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal ones share the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0])
    [1.5, 0.0, 1.5]
    """
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    a, b = ranks(one), ranks(other)
    mean = (len(a) - 1) / 2
    above = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return above / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def pairs_kept(rows: Sequence[Mapping[str, Any]], measure: str, least: float = 0.02) -> tuple[int, int]:
    """Of pairs of the same model and chips whose compiled values lie further apart than ``least``: how many are in the planned order, and all."""
    kept = number = 0
    for a, b in combinations(rows, 2):
        if a["question"] != b["question"]:
            continue
        first, second = a["compiled"][measure], b["compiled"][measure]
        if abs(first - second) > least * max(first, second):
            number += 1
            kept += (a["planned"][measure] - b["planned"][measure]) * (first - second) > 0
    return kept, number


def table(saved: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the page."""
    rows = [row for row in saved.values() if row.get("compiled")]
    failed = [row for row in saved.values() if row not in rows]
    yield (
        f"{len(rows)} candidates of {len({row['question'].split()[0] for row in rows})} models with few layers and real widths, on "
        f"{len({row['question'].split()[1].split(':')[0] for row in rows})} kinds of chips, 32 rows of 4,096 tokens in bfloat16. `pairs` are of the same model "
        "and chips, and more than 2% apart as compiled."
        + (f" {len(failed)} more could not be compiled." if failed else "")
    )
    yield ""
    yield "| | Spearman's correlation of ranks | pairs in the planned order |"
    yield "|---|---:|---:|"
    for name, measure in MEASURES.items():
        sides = [[row[side][measure] for row in rows] for side in ("planned", "compiled")]
        kept, number = pairs_kept(rows, measure)
        yield f"| {name} | {spearman(*sides):.3f} | {kept} of {number} |"
    yield ""
    yield "| model, chips | layers | layout | moved, planned | compiled | memory, planned | compiled | on links, planned | compiled | step, planned | compiled |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        sides = row["planned"], row["compiled"]
        cells = [
            row["question"],
            str(row["layers"]),
            row["text"],
            *(f"{side['moved_bytes'] / GIB:.2f} GiB" for side in sides),
            *(f"{side['memory_bytes'] / GIB:.2f} GiB" for side in sides),
            *(f"{side['link_seconds'] * 1e3:.1f} ms" for side in sides),
            *(f"{side['step_seconds'] * 1e3:.1f} ms" for side in sides),
        ]
        yield f"| {' | '.join(cells)} |"


def _saved() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def _write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(table(_saved()))}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Compile some more, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a search")
    parser.add_argument("--most", type=int, default=1000, help="candidates to compile in this run")
    parser.add_argument("--only", default="", metavar="TEXT", help="only questions with this in their names")
    parser.add_argument("--page", action="store_true", help="write the table of docs/search.md")
    options = parser.parse_args()
    if options.page:
        _write_page()
        return
    os.nice(10)
    saved, left = _saved(), options.most
    for question in QUESTIONS:
        there = sum(row["question"] == question.name for row in saved.values())
        if options.only not in question.name or there >= question.number or not left:
            continue
        for row in candidates(question, options.budget):
            name = f"{question.name} {row.text}"
            if name in saved or not left:
                continue
            saved[name], left = compiled(question, row), left - 1
            RESULTS.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            print(name, saved[name].get("failed", saved[name].get("state")), flush=True)


if __name__ == "__main__":
    main()
