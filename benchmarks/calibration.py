"""Six steps of test models beside their estimates, before and after `shardwright calibrate`, on this machine.

python -m benchmarks.calibration [--quick] [--only TEXT]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.cost.calibration import typical

CASES = (
    "llama3-test --layout fsdp --mesh fsdp=8 --batch 16 --length 128",
    "llama3-test --layout fsdp-tp --mesh fsdp=2,tensor=4 --batch 16 --length 128",
    "mixtral-test --layout ep --mesh fsdp=2,expert=4 --batch 16 --length 128 --set num_layers=6",
    "deepseek3-test --layout ep-as-cp --mesh fsdp=2,expert=4 --batch 16 --length 128 --set num_layers=6",
    "llama3-test --engine torch --layout fsdp --mesh fsdp=4 --batch 16 --length 128",
    "mixtral-test --engine torch --layout ep --mesh fsdp=1,expert=4 --batch 16 --length 128 --set num_layers=6",
)
COMMAND = "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
STEPS, SETTLED = 16, 4


def main() -> None:
    """Calibrate, train, and compare each."""
    options = begin(__doc__, devices=None)
    rows, numbers = [], []
    for case in CASES:
        if options.only not in case:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file, run = Path(folder) / "mine.toml", Path(folder) / "run"
            found = json.loads(_shardwright("calibrate", *case.split(), "--out", str(file), "--json"))
            devices = "8" if "--engine torch" not in case else "4"
            _shardwright("train", *case.split(), "--devices", devices, "--steps", str(STEPS), "--out", str(run))
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            measured = typical([line["step_s"] for line in lines if "step_s" in line][SETTLED:])
        estimated = found["estimates"][-1]["after_seconds"]
        spread = max(one["spread"] for one in found["measured"])
        rows.append(
            [case, f"{measured:.3f}", "none", f"{estimated:.3f}", f"{estimated / measured - 1:+.0%}", f"{spread:.0%}"]
        )
        numbers.append({"case": case, "measured_s": measured, "estimated_s": estimated, "calibration": found})
        print("  ".join(rows[-1]), flush=True)
    worst = max(abs(each["estimated_s"] / each["measured_s"] - 1) for each in numbers)
    keep(
        Found(
            name="calibration",
            title="Steps of test models beside their estimates",
            columns=[
                "step",
                "measured, s",
                "estimated before, s",
                "after, s",
                "error",
                "largest spread of a measurement",
            ],
            rows=rows,
            headline=f"{len(rows)} steps, the worst estimate {worst:.0%} off",
            notes=("Before a calibration a CPU has no numbers, and so no estimate.",),
            numbers=numbers,
        ),
        options.load_before,
    )


def _shardwright(*arguments: str) -> str:
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
