"""Expert-parallel dispatch methods compared with each other: in one process, in alternation.

python -m benchmarks.moe [--quick] [--only TEXT]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from benchmarks.cases import Case, ours
from benchmarks.options import begin
from benchmarks.results import Found, keep
from benchmarks.timing import ratio, take_turns

MESH = "fsdp=2,expert=4"


def _moved(model: str) -> dict[str, Case]:
    """The layout's own method first; it is compiled once for all groups that contain it."""
    return {
        how: Case(model=model, layout="ep", mesh=MESH, move=move)
        for how, move in (("all-to-all", None), ("ring", "moe=ring"), ("weights", "moe=weights"))
    }


def _dropped(model: str) -> dict[str, Case]:
    return {
        "dropless": Case(model=model, layout="ep", mesh=MESH),
        "capacity 1.25": Case(model=model, layout="ep", mesh=MESH, set="capacity_factor=1.25"),
    }


COMPARED: Mapping[str, Mapping[str, Case]] = {
    "movements, mixtral-test": _moved("mixtral-test"),
    "movements, deepseek3-test": _moved("deepseek3-test"),
    "one row a device, deepseek3-test": {
        "ep": Case(model="deepseek3-test", layout="ep", mesh=MESH),
        "ep-as-cp": Case(model="deepseek3-test", layout="ep-as-cp", mesh=MESH),
    },
    # `ep` does not shard within a row, so with four rows it runs on four devices.
    "half a row a device, deepseek3-test": {
        "ep, 4 devices of the 8": Case(model="deepseek3-test", layout="ep", mesh="fsdp=1,expert=4", rows=4),
        "ep-as-cp, all 8": Case(model="deepseek3-test", layout="ep-as-cp", mesh=MESH, rows=4),
    },
    "dropping, mixtral-test": _dropped("mixtral-test"),
    "dropping, deepseek3-test": _dropped("deepseek3-test"),
}
NOTES = (
    "Ratio: CPU seconds of a step over those of the first of its group, the median of the blocks and the quarters "
    "around it. On CPU nothing crosses a link: these are the costs of the work and the copies, not of a network.",
    "Half a row a device: four rows of 128 tokens. `ep` holds whole rows, so that it has work for four of the eight devices "
    "(more are refused, SW108); CPU seconds do not see the four that would wait.",
)


def main() -> None:
    """Time all groups."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    compiled = cache(ours)
    for group, cases in COMPARED.items():
        if options.only not in group:
            continue
        running = {name: compiled(case) for name, case in cases.items()}
        times = take_turns(
            {name: each.go for name, each in running.items()},
            blocks=options.blocks(5),
            block_s=options.block_s(0.6),
        )
        first = next(iter(times.values()))
        for name, each in times.items():
            against = ratio(each.cpu_s, first.cpu_s)
            tokens_per_s = cases[name].tokens / each.wall
            rows.append([group, name, f"{tokens_per_s:,.0f}", f"{each.cpu:.3f}", str(against)])
            numbers.append(
                {"group": group, "way": name, "case": str(cases[name]), "times": each.to_json()}
                | {"cpu_ratio": against.to_json()}
            )
            print("  ".join(rows[-1]), flush=True)
    keep(
        Found(
            name="moe",
            title="Ways to bring tokens and experts together",
            columns=["compared", "method", "tokens/s", "CPU s/step", "ratio of CPU"],
            rows=rows,
            headline="; ".join(f"{row[0]}, {row[1]}: {row[3]} CPU s" for row in rows),
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
