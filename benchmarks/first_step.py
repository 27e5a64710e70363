"""Time from the command `shardwright train` to its first step: plan, text, initial values, compilation, the step.

python -m benchmarks.first_step [--quick] [--only TEXT]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import begin
from benchmarks.results import Found, keep

COMMAND = "from shardwright.cli.main import main; raise SystemExit(main())"
RUNS = (
    ("llama3-test", "fsdp", "fsdp=8"),
    ("deepseek3-test", "ep-as-cp", "fsdp=2,expert=4"),
)


def run(model: str, layout: str, mesh: str) -> dict[str, float]:
    """A run of one step on the text of Python's library, its last save included in ``whole_s`` only."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-c", COMMAND, "train", model, "--layout", layout, "--mesh", mesh]
        command += ["--devices", "8", "--data", "stdlib", "--steps", "2", "--stop-after", "1", "--out", str(out)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        metrics = out / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        first_step_s = time.perf_counter() - started
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(output)
        whole_s = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record = json.loads(metrics.read_text(encoding="utf-8").splitlines()[0])
        return {
            "first_step_s": first_step_s,
            "step_s": record["step_s"],
            "whole_s": whole_s,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        }


def main() -> None:
    """Time the runs."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for model, layout, mesh in RUNS:
        if options.only not in f"{model} {layout}":
            continue
        times = run(model, layout, mesh)
        cells = (f"{times[name]:.1f}" for name in ("first_step_s", "step_s", "whole_s", "cpu_s"))
        rows.append([f"{model} {layout} {mesh}", *cells])
        numbers.append({"model": model, "layout": layout, "mesh": mesh, **times})
        print("  ".join(rows[-1]), flush=True)
    keep(
        Found(
            name="first_step",
            title="Time from `shardwright train` to its first step",
            columns=["run", "first step done, s", "of it the step", "ended and saved, s", "CPU s in all"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[1]} s" for row in rows),
            notes=("One run each. Text: the source of Python's standard library, read and split into bytes.",),
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
