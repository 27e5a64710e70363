"""Tokens a second of Shardwright's step against the same mathematics by hand, in one process, in alternation.

python -m benchmarks.step [--quick] [--only TEXT]
"""

from __future__ import annotations

from benchmarks.agreement import disagreement, require_agreement
from benchmarks.cases import Case, handwritten, ours
from benchmarks.options import begin
from benchmarks.results import Found, keep
from benchmarks.timing import ratio, take_turns

EP = "fsdp=2,expert=4"
CASES = (
    Case(model="llama3-test", layout="fsdp", mesh="fsdp=8"),
    Case(model="llama3-test", layout="fsdp-tp", mesh="fsdp=4,tensor=2"),
    Case(model="mixtral-test", layout="ep", mesh=EP, set="capacity_factor=1.25"),
    Case(model="deepseek3-test", layout="ep", mesh=EP, set="capacity_factor=1.25"),
    Case(model="mixtral-test", layout="ep", mesh=EP),
    Case(model="deepseek3-test", layout="ep", mesh=EP),
)
NOTES = (
    "Ratio: tokens a second of ours over those by hand, the median of the blocks and the quarters around it; "
    "above 1 ours is faster. CPU: seconds of all cores, which other programs on the machine disturb less.",
    "By hand, without a capacity every expert sees every token (no ragged product is partitioned by the compiler); "
    "ours multiplies a token with its own experts only.",
    "The two agree in the loss and the gradient norm of three steps to the relative difference shown.",
)


def main() -> None:
    """Time all cases."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for case in CASES:
        if options.only not in str(case):
            continue
        our, their = ours(case), handwritten(case)
        worst = disagreement(our, their)
        require_agreement(case, worst)
        times = take_turns(
            {"ours": our.go, "by hand": their.go}, blocks=options.blocks(5), block_s=options.block_s(1.0)
        )
        mine, hand = times["ours"], times["by hand"]
        cpu, wall = ratio(hand.cpu_s, mine.cpu_s), ratio(hand.wall_s, mine.wall_s)
        rows.append(
            [
                str(case),
                f"{case.tokens / mine.wall:,.0f}",
                f"{case.tokens / hand.wall:,.0f}",
                str(wall),
                f"{mine.cpu:.3f}",
                f"{hand.cpu:.3f}",
                str(cpu),
                f"{worst:.0e}",
            ]
        )
        numbers.append(
            {"case": str(case), "ours": mine.to_json(), "by_hand": hand.to_json(), "difference": worst}
            | {"cpu_ratio": cpu.to_json(), "wall_ratio": wall.to_json()}
        )
        print("  ".join(rows[-1]), flush=True)
    lowest = min(number["cpu_ratio"]["middle"] for number in numbers)
    keep(
        Found(
            name="step",
            title="A training step against the same mathematics by hand",
            columns=[
                "case",
                "tokens/s",
                "by hand",
                "ratio",
                "CPU s/step",
                "by hand",
                "ratio of CPU",
                "difference",
            ],
            rows=rows,
            headline=f"CPU ratios from {lowest:.2f} up over {len(rows)} cases",
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
