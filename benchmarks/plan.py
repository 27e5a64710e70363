"""Time of `shardwright plan` for big models: the entire command, and the planning in it.

python -m benchmarks.plan [--quick]
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.planning import make_plan

MODELS = ("deepseek3-671b", "llama3-405b", "mixtral-8x22b")
COMMAND = "from shardwright.cli.main import main; raise SystemExit(main())"


def main() -> None:
    """Time every model's natural layout."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    for model in MODELS:
        whole, planning = [], []
        for _ in range(3 if options.quick else 7):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", COMMAND, "plan", model], stdout=subprocess.DEVNULL, check=True)
            whole.append(time.perf_counter() - started)
            started = time.process_time()
            make_plan(typed_request(model, None, PlanOptions()).request)
            planning.append(time.process_time() - started)
        rows.append([model, f"{median(whole):.2f}", f"{min(whole):.2f}", f"{median(planning) * 1e3:.0f}"])
        numbers.append({"model": model, "command_s": whole, "planning_cpu_s": planning})
    keep(
        Found(
            name="plan",
            title="Time of `shardwright plan`",
            columns=["model", "command, s (median)", "fastest", "planning, ms of CPU"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[1]} s" for row in rows),
            numbers=numbers,
        ),
        options.load_before,
    )


if __name__ == "__main__":
    main()
