"""Steps at sizes for which other frameworks were timed, on 2-core machines of one kind.

python -m benchmarks.scale [--quick] [--only TEXT]
"""

from __future__ import annotations

from benchmarks.cases import Case, ours
from benchmarks.options import begin
from benchmarks.results import Found, keep
from benchmarks.timing import take_turns

MESH = "fsdp=2,expert=4"
CPU, RATE = "CPU s/step", "tokens/s"
CASES = (
    (Case(model="deepseek3-test", layout="ep", mesh=MESH, set="capacity_factor=1.25"), CPU, 0.58),
    (Case(model="deepseek3-test", layout="ep", mesh=MESH), CPU, 0.58),
    (Case(model="deepseek3-test", layout="ep-as-cp", mesh=MESH, set="capacity_factor=1.25"), CPU, 0.90),
    (Case(model="deepseek3-test", layout="ep-as-cp", mesh=MESH), CPU, 0.90),
    (Case(model="llama3-test", layout="fsdp", mesh="fsdp=1"), RATE, 1100.0),
    (Case(model="llama3-test", layout="fsdp", mesh="fsdp=1", remat="none"), RATE, 1100.0),
    (Case(model="llama3-test", layout="fsdp", mesh="fsdp=1", rows=2, length=2048), RATE, 1100.0),
)
NOTES = (
    "MaxText (2026-08, dense path with a capacity, the sizes of deepseek3-test, its default preset and ep-as-cp): 0.58 and "
    "0.90 CPU seconds a step. Its dropless path does not run on CPU.",
    "TorchTitan (2026, its debug model of 6 M parameters, patched to run on CPU): 1,100 tokens/s on one rank. "
    "llama3-test has these sizes. Both were timed on other days; the machine is of the same kind.",
)


def main() -> None:
    """Time all cases, one after the other."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for case, unit, theirs in CASES:
        if options.only not in str(case) or (options.quick and case.length > 1000):
            continue
        step = ours(case)
        times = take_turns({"ours": step.go}, blocks=options.blocks(5), block_s=options.block_s(0.7))["ours"]
        tokens_per_s = case.tokens / times.wall
        ahead = theirs / times.cpu if unit == CPU else tokens_per_s / theirs
        framework = "MaxText" if unit == CPU else "TorchTitan"
        rows.append(
            [str(case), f"{times.cpu:.3f}", f"{tokens_per_s:,.0f}", f"{framework} {theirs:,g} {unit}", f"{ahead:.2f}"]
        )
        numbers.append({"case": str(case), "times": times.to_json(), "theirs": theirs, "unit": unit, "ahead": ahead})
        print("  ".join(rows[-1]), flush=True)
    keep(
        Found(
            name="scale",
            title="Steps of sizes that others have been timed at",
            columns=["case", "CPU s/step", "tokens/s", "theirs", "times as fast"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[4]} times" for row in rows),
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
